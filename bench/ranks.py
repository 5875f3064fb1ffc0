"""Several ranks of one machine. `memory`: the host memory of all of them, next to one process.

Ranks share the weights of experts (dynamic placement) and divide the optimizer states; each has
the dense part, gradients for other ranks, and the libraries. The figure is the sum over processes
of their proportional set size after two steps: a page that n of them map counts 1/n in each. Needs
no GPU: ranks are gloo processes on the CPU.

PYTHONPATH=src python3 bench/ranks.py memory
"""

import argparse
import multiprocessing
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from record import Limit, metric, write_record
from torch.distributed.device_mesh import init_device_mesh

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings

RANKS = (1, 2, 4)
SEQ = 64
CONFIG = GPTConfig(
    vocab=256,
    n_layers=6,
    d_model=512,
    d_hidden=1536,
    gated=True,
    n_heads=8,
    n_experts=32,
    top_k=2,
    max_seq=SEQ,
)
MORE, EACH = 1.05, 1.0
"""What ranks may need: a share of one process, and GiB for each rank."""


def resident() -> float:
    """The proportional set size of this process, in GiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("Pss:"))
    return int(line.split()[1]) / 2**20


def train(rank: int, n_ranks: int, store: str, results: "multiprocessing.Queue[float]") -> None:
    torch.set_num_threads(1)
    mesh = None
    if n_ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks
        )
        mesh = init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("expert",))
    model = GPTMoE(CONFIG, seed=0, meta_experts=True, dtype=torch.bfloat16)
    settings = Settings(threads=1, placement="auto" if mesh is None else "dynamic")
    overspill.offload(
        model, device="cpu", mode="host", slots=8, mesh=mesh, settings=settings, quiet=True
    )
    optimizer = overspill.AdamW(model, lr=1e-4)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        shape = (4 // n_ranks, SEQ + 1)  # the same tokens on all ranks together
        tokens = torch.randint(0, CONFIG.vocab, shape, generator=generator)
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.overspill.flush()
    if n_ranks > 1:
        dist.barrier()
    results.put(resident())
    if n_ranks > 1:
        dist.barrier()  # no process ends, and leaves its pages to others, before all have counted
        dist.destroy_process_group()


def measure(n_ranks: int) -> float:
    """GiB of all processes together."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = n_ranks, str(Path(folder) / "store"), results
        processes = [context.Process(target=train, args=(rank, *args)) for rank in range(n_ranks)]
        for process in processes:
            process.start()
        sizes = [results.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    return sum(sizes)


def memory(out: Path | None) -> None:
    found = {n_ranks: measure(n_ranks) for n_ranks in RANKS}
    limits = {n: MORE * found[1] + EACH * n for n in RANKS[1:]}
    experts = CONFIG.n_layers * CONFIG.n_experts * 3 * CONFIG.d_model * CONFIG.d_hidden
    last = RANKS[-1]
    write_record(
        "ranks-memory",
        {
            "row": f"host memory of ranks that share {experts / 1e6:.0f} M expert parameters",
            "model": vars(CONFIG),
        },
        {f"ranks_{n}": metric([found[n]], "GiB") for n in RANKS[::-1]},
        Limit(limits[last], "GiB", "one process + 5% + 1 GiB for each rank"),
        out,
        table=[
            {
                "processes": n,
                "host memory": f"{size:.2f} GiB",
                "over one process": f"{size - found[1]:.2f} GiB",
                "allowed": f"{limits[n] - found[1]:.2f} GiB" if n in limits else "",
            }
            for n, size in found.items()
        ],
    )
    for n, limit in limits.items():
        assert found[n] <= limit, f"{n} ranks need {found[n]:.2f} GiB, allowed are {limit:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["memory"])
    parser.add_argument("--out", type=Path, help="folder of the records; default bench/results")
    args = parser.parse_args()
    memory(args.out)


if __name__ == "__main__":
    main()
