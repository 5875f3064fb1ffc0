"""The workloads of `bench/ab.py`: one of them, measured in this process, as a line of JSON.

PYTHONPATH=<checkout>/src python3 bench/ab_work.py train-12 --folder FOLDER

Only the public interface is used, so that old and new versions run the same file. The number of
experts that live on the GPU is given: it would follow free memory and time otherwise.
"""

import argparse
import gc
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import overspill

Step = Callable[[], tuple[float, float]]
"""Does some work; returns its seconds and into how many steps or tokens they divide."""


@dataclass(frozen=True)
class Size:
    """Sizes of all workloads."""

    device: str = "cuda"
    layers: int = 6
    """W1 and W2 are cut to so many layers; the time of a layer stays."""
    batch: int = 16
    seq: int = 1024
    tokens: int = 150
    """New tokens of a request."""
    prompt: int = 512
    requests: int = 16
    warm: int = 3
    rounds: int = 12
    seconds: float = 10.0
    """After which no further round begins."""


TINY = Size("cpu", 2, 4, 16, 4, 16, 2, 1, 2)


# -- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """Steps of W1 with this budget of GPU memory."""

    gpu_memory: str
    resident: float
    """Share of the experts that live on the GPU; `streamed` ones pass through GPU slots."""
    clip: bool = False
    micro: int = 1
    transformers: bool = False
    """A Mixtral of transformers in the shape of W1."""
    ranks: int = 1

    def model(self, size: Size, mesh: Any = None) -> Any:
        tiny = size.device == "cpu"
        given: dict[str, Any] = {"device": size.device, "quiet": True, "progress": False}
        if mesh is not None:
            given |= {"mode": "host", "mesh": mesh}
        else:
            given["gpu_experts"] = round(self.resident * size.layers * (4 if tiny else 16))
        if not tiny:
            given |= {"gpu_memory": self.gpu_memory, "slots": 46}
        if self.transformers:
            from transformers import MixtralConfig

            config = MixtralConfig(
                vocab_size=512 if tiny else 32_000, hidden_size=32 if tiny else 1024,
                intermediate_size=64 if tiny else 4096, num_hidden_layers=size.layers,
                num_attention_heads=4 if tiny else 16, num_key_value_heads=4 if tiny else 16,
                num_local_experts=4 if tiny else 16, num_experts_per_tok=2,
                max_position_embeddings=size.seq, tie_word_embeddings=False,
            )  # fmt: skip
            return overspill.from_config(config, dtype=torch.bfloat16, **given)
        from overspill.models.presets import get_preset

        small = {"vocab": 512, "d_model": 32, "d_hidden": 64, "n_heads": 4, "n_experts": 4}
        shape = get_preset("w1", n_layers=size.layers, max_seq=size.seq, **(small if tiny else {}))
        model = overspill.GPTMoE(
            shape, seed=0, meta_experts=True, device=size.device, dtype=torch.bfloat16
        )
        return overspill.offload(model, **given)

    @contextmanager
    def open(self, size: Size, folder: Path, rank: int = 0, mesh: Any = None) -> Iterator[Step]:
        model = self.model(size, mesh)
        optimizer = overspill.AdamW(model, lr=1e-4, max_grad_norm=1.0 if self.clip else None)
        generator = torch.Generator(size.device).manual_seed(rank)

        def step() -> tuple[float, float]:
            shape = (size.batch // self.ranks, size.seq + 1)
            tokens = torch.randint(0, 500, shape, device=size.device, generator=generator)
            start = time.perf_counter()
            for number, part in enumerate(tokens.chunk(self.micro)):
                last = number == self.micro - 1
                with nullcontext() if last else optimizer.accumulate():
                    (self._loss(model, part) / self.micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            _synchronize()
            return time.perf_counter() - start, 1

        yield _counting(step, model)
        model.overspill.close()

    def _loss(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        if self.transformers:
            return model(tokens[:, :-1], labels=tokens[:, :-1]).loss
        return model(tokens[:, :-1], tokens[:, 1:]).loss


def _train_as_rank(
    rank: int, work: Training, size: Size, folder: Path, results: "multiprocessing.Queue[Any]"
) -> None:
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=work.ranks)
    mesh = init_device_mesh("cpu", (work.ranks,), mesh_dim_names=("expert",))
    # all ranks take the same steps, however long
    with work.open(size, folder, rank, mesh) as step:
        found = measure(step, replace(size, seconds=float("inf")))
        dist.barrier()
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def run_ranks(work: Training, size: Size) -> dict[str, Any]:
    """The result of the first of several processes, which share the GPU."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = work, size, Path(folder), results
        ranks = [context.Process(target=_train_as_rank, args=(n, *args)) for n in range(work.ranks)]
        for process in ranks:
            process.start()
        found: dict[str, Any] = results.get(timeout=400)
        for process in ranks:
            process.join()
    return found


# -- serving --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    """Requests to W2, Qwen3-30B-A3B with fewer layers."""

    resident: float = 0.0
    """Share of the experts that live on the GPU."""
    cached: float = 0.0
    """Share of the experts that the decode cache holds."""
    requests: int = 1
    prompt: bool = False
    """A prompt without an answer is measured, after requests that have filled the cache."""
    quantize: str | None = None

    @contextmanager
    def open(self, size: Size, folder: Path) -> Iterator[Step]:
        tiny = size.device == "cpu"
        experts = size.layers * (8 if tiny else 128)
        model = self._model(size, folder, round(self.resident * experts))
        slots = round(self.cached * experts)
        llm = overspill.LLM(
            model, context=64 if tiny else 2048, max_batch=size.requests, slots=slots
        )
        random, seeds = torch.Generator().manual_seed(0), itertools.count()

        def answer() -> tuple[float, float]:
            count = min(self.requests, size.requests)
            params = [
                overspill.SamplingParams(
                    max_tokens=size.tokens, temperature=1.0, seed=next(seeds), ignore_eos=True
                )
                for _ in range(count)
            ]
            before = llm.stats()
            llm.generate([[100 + number, *range(2, 9)] for number in range(count)], params)
            after = llm.stats()
            seconds = after["decode_seconds"] - before["decode_seconds"]
            return seconds, after["decode_tokens"] - before["decode_tokens"]

        def read() -> tuple[float, float]:
            prompt = torch.randint(100, 500, (size.prompt,), generator=random).tolist()
            start = time.perf_counter()
            llm.generate([prompt], overspill.SamplingParams(max_tokens=1, ignore_eos=True))
            return time.perf_counter() - start, 1

        if self.prompt and slots:
            answer()
        with llm:
            yield _counting(read if self.prompt else answer, model)
        model.overspill.close()

    def _model(self, size: Size, folder: Path, resident: int) -> Any:
        given: dict[str, Any] = {
            "gpu_experts": resident, "device": size.device, "train": False, "quiet": True,
            "progress": False,
        }  # fmt: skip
        if self.quantize is None:
            return overspill.from_config(_qwen(size), dtype=torch.bfloat16, **given)
        checkpoint = folder / "w2"
        if not checkpoint.exists():  # the version that comes first writes it for both
            plain = {"dtype": torch.bfloat16, "train": False, "quiet": True, "device": "cpu"}
            model = overspill.from_config(_qwen(size), mode="host", slots=2, **plain)
            overspill.save(model, checkpoint)
            model.overspill.close()
        return overspill.load(checkpoint, quantize=self.quantize, **given)


def _qwen(size: Size) -> Any:
    from transformers import Qwen3MoeConfig

    if size.device == "cpu":
        return Qwen3MoeConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
            num_hidden_layers=size.layers, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, num_experts=8, num_experts_per_tok=2, max_position_embeddings=512,
            tie_word_embeddings=False,
        )  # fmt: skip
    return Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=size.layers, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
        rope_theta=1e6, max_position_embeddings=40_960, tie_word_embeddings=False,
    )  # fmt: skip


# -- measuring ------------------------------------------------------------------------------------

WORKS: dict[str, Training | Serving] = {
    "train-5": Training("5GiB", 0.0),
    "train-5-clip": Training("5GiB", 0.0, clip=True),
    "train-12": Training("12GiB", 0.14),
    "train-12-clip": Training("12GiB", 0.14, clip=True),
    "train-64": Training("64GiB", 1.0),
    "train-64-clip": Training("64GiB", 1.0, clip=True),
    "train-hf": Training("12GiB", 0.14, transformers=True),
    "train-micro": Training("12GiB", 0.14, micro=4),
    "train-ranks": Training("12GiB", 0.0, ranks=2),
    "decode-none": Serving(),
    "decode-quarter": Serving(cached=0.25),
    "decode-all": Serving(resident=1.0),
    "decode-batch": Serving(cached=0.25, requests=16),
    "prompt-none": Serving(prompt=True),
    "prompt-half": Serving(cached=0.5, prompt=True),
    "packed-none": Serving(quantize="mxfp4"),
    "packed-all": Serving(resident=1.0, quantize="mxfp4"),
}


class Waits:
    """Within a `with` block: CPU time of the waits of this thread for the GPU, which poll."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._undo = ExitStack()

    def __enter__(self) -> "Waits":
        for kind in (torch.cuda.Event, torch.cuda.Stream):
            self._undo.callback(setattr, kind, "synchronize", kind.synchronize)
            kind.synchronize = self._timed(kind.synchronize)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _timed(self, wait: Callable[[Any], None]) -> Callable[[Any], None]:
        def timed(waited: Any) -> None:
            start = time.thread_time()
            wait(waited)
            self.seconds += time.thread_time() - start

        return timed


class Counted:
    """A step, and the bytes that it has copied."""

    def __init__(self, step: Step, recorder: Any) -> None:
        self._step, self._recorder = step, recorder

    def __call__(self) -> tuple[float, float]:
        return self._step()

    def bytes(self) -> int:
        """All bytes that were copied between device, host memory and disk so far, when copies for
        the next step, which run ahead, have ended."""
        before = -1
        while (now := sum(self._recorder.counters().values())) != before:
            before = now
            time.sleep(0.2)
        return now


def _counting(step: Step, model: Any) -> Counted:
    return Counted(step, model.overspill.recorder)


def measure(step: Any, size: Size) -> dict[str, Any]:
    """Median seconds of a step or token; host time, synchronizations and copied bytes of one."""
    for _ in range(size.warm):
        step()
    _synchronize()
    bytes_before, began = step.bytes(), time.perf_counter()
    host, found, units = 0.0, [], 0.0
    with Waits() as waits:
        while len(found) < size.rounds and time.perf_counter() - began < size.seconds:
            gc.collect()  # between steps, at the same points in both versions
            thread, waited = time.thread_time(), waits.seconds
            seconds, count = step()
            host += time.thread_time() - thread - (waits.seconds - waited)
            units += count
            found.append(seconds / count)
    copied = step.bytes() - bytes_before
    return {
        "seconds": statistics.median(found),
        "host": host / units,
        "syncs": _synchronizations(step),
        "bytes": copied / units,
    }


def _synchronizations(step: Step) -> float | None:
    """Calls of a step that wait for a stream or an event; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        _, count = step()
    names = ("cudaStreamSynchronize", "cudaEventSynchronize")
    return sum(event.count for event in seen.key_averages() if event.key in names) / count


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def run(name: str, folder: Path, smoke: bool) -> dict[str, Any]:
    work, size = WORKS[name], TINY if smoke else Size()
    if isinstance(work, Training) and work.ranks > 1:
        return run_ranks(work, size)
    with work.open(size, folder) as step:
        return measure(step, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(WORKS))
    parser.add_argument("--folder", type=Path, required=True, help="for files that versions share")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    args = parser.parse_args()
    found = run(args.name, args.folder, args.smoke)
    print(json.dumps({"source": str(Path(overspill.__file__).parents[1]), **found}))


if __name__ == "__main__":
    main()
