"""Several ranks of one machine. `memory`: the host memory of all of them, next to one process.
`exchange`: two ranks that share a GPU, over gloo, and how long they exchange token rows.

Ranks share the weights of experts (dynamic placement) and divide the optimizer states; each has
the dense part, gradients for other ranks, and the libraries. The figure is the sum over processes
of their proportional set size after two steps: a page that n of them map counts 1/n in each. Needs
no GPU: ranks are gloo processes on the CPU.

PYTHONPATH=src python3 bench/ranks.py memory
PYTHONPATH=src python3 bench/ranks.py exchange
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from record import Limit, metric, write_record
from torch.distributed.device_mesh import init_device_mesh

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.presets import get_preset
from overspill.moe.settings import Settings
from overspill.parallel import dense
from overspill.parallel.exchange.interface import Exchange
from overspill.parallel.ranks import Ranks
from overspill.transfer.work_stream import Arrival

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
LAYERS, BATCH, WARM, STEPS = 6, 16, 2, 4
"""Work of `exchange`."""
MORE, EACH = 1.05, 1.0
"""Memory that ranks may need: a share of one process, and GiB for each rank."""


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


def run_processes(n_ranks: int, train: Callable[..., None]) -> list[Any]:
    """The results that the ranks have put into the queue."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = n_ranks, str(Path(folder) / "store"), results
        processes = [context.Process(target=train, args=(rank, *args)) for rank in range(n_ranks)]
        for process in processes:
            process.start()
        found = [results.get(timeout=600) for _ in processes]
        for process in processes:
            process.join()
    return found


def memory(out: Path | None) -> None:
    found = {n_ranks: sum(run_processes(n_ranks, train)) for n_ranks in RANKS}
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


class Timed(NamedTuple):
    """A step of one rank, in seconds."""

    step: float
    exchange: float


class ExchangeTimer:
    """Time of the calls to other ranks, each from the end of earlier work of the device. Each is
    waited for: nothing runs beside it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for owner, name in ((Exchange, "send"), (Ranks, "gather_numbers"), (dense, "average_")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            torch.cuda.synchronize()
            start = time.perf_counter()
            found = call(*args)
            if isinstance(found, Arrival):
                found.wait()
            torch.cuda.synchronize()
            self.seconds += time.perf_counter() - start
            return found

        return timed


def train_on_gpu(
    rank: int, n_ranks: int, store: str, results: "multiprocessing.Queue[list[Timed]]"
) -> None:
    mesh = None
    if n_ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=n_ranks
        )
        mesh = init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("expert",))
    exchange = ExchangeTimer()
    config = get_preset("w1", n_layers=LAYERS)
    model = GPTMoE(config, seed=0, meta_experts=True, device="cuda", dtype=torch.bfloat16)
    overspill.offload(model, gpu_memory="12GiB", mode="host", mesh=mesh, device="cuda", quiet=True)
    optimizer = overspill.AdamW(model, lr=1e-4)
    generator = torch.Generator("cuda").manual_seed(rank)
    found = []
    for _ in range(WARM + STEPS):
        shape = (BATCH // n_ranks, 1024 + 1)
        tokens = torch.randint(0, config.vocab, shape, generator=generator, device="cuda")
        torch.cuda.synchronize()
        start, before = time.perf_counter(), exchange.seconds
        model(tokens[:, :-1], tokens[:, 1:]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        found.append(Timed(time.perf_counter() - start, exchange.seconds - before))
    model.overspill.flush()
    results.put(found[WARM:])
    if n_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def exchange(out: Path | None) -> None:
    """The same tokens with one process, and with two ranks on the same GPU."""
    alone, together = (run_processes(n, train_on_gpu) for n in (1, 2))
    tokens = BATCH * 1024
    speeds = {
        n: [tokens / max(step.step for step in steps) for steps in zip(*found, strict=True)]
        for n, found in ((1, alone), (2, together))
    }
    shares = [100 * step.exchange / step.step for found in together for step in found]
    write_record(
        "ranks-2-h200",
        {
            "row": f"two ranks that share a GPU over gloo, W1 cut to {LAYERS} layers, "
            f"{BATCH}×1024 tokens together, experts in host memory",
            "show": ["exchange", "alone"],
        },
        {
            "tokens_per_second": metric(speeds[2], "tokens/s"),
            "exchange": metric(shares, "%"),
            "alone": metric(speeds[1], "tokens/s"),
        },
        None,
        out,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["memory", "exchange"])
    parser.add_argument("--out", type=Path, help="folder of the records; default bench/results")
    args = parser.parse_args()
    {"memory": memory, "exchange": exchange}[args.what](args.out)


if __name__ == "__main__":
    main()
