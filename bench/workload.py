"""Common code of the training benchmarks: a model on random tokens, timed steps, memory."""

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import overspill
from overspill.core.garbage import short_collections
from overspill.hardware.machine import peak_resident_memory
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from overspill.trace.perfetto import write_perfetto
from overspill.trace.picture import draw_timeline
from overspill.trace.spans import STEP

SEQ = 1024


@dataclass
class Run:
    """One measured workload."""

    tokens: int
    seconds: list[float]
    loss: float
    gpu_bytes: int
    host_bytes: int
    busy: dict[str, float]
    on_gpu: float = 0.0  # share of the experts that live on the GPU

    @property
    def speed(self) -> list[float]:
        return [self.tokens / seconds for seconds in self.seconds]


@dataclass(frozen=True)
class Work:
    """One step: `batch` sequences in `micro` micro-batches, which each expert computes together
    (`grouped`) or one after another."""

    batch: int
    micro: int = 1
    grouped: bool = True


def build(
    config: GPTConfig, settings: Settings | None = None, device: str = "cuda", **budgets: object
) -> GPTMoE:
    """An offloaded bf16 model whose experts are initialized in their records."""
    start = time.perf_counter()
    model = GPTMoE(config, seed=0, meta_experts=True, device=device, dtype=torch.bfloat16)
    overspill.offload(model, settings=settings, device=device, quiet=True, **budgets)
    print(f"offloaded in {time.perf_counter() - start:.1f} s", flush=True)
    return model


def optimize(
    model: GPTMoE, norm: float | None = None, state_dtype: torch.dtype | None = None
) -> overspill.AdamW:
    gc.collect()  # an engine has one optimizer at a time: frees the previous one
    start = time.perf_counter()
    model.overspill.flush()
    optimizer = overspill.AdamW(model, lr=1e-4, max_grad_norm=norm, state_dtype=state_dtype)
    took = time.perf_counter() - start
    print(f"states in {took:.1f} s: {model.overspill.describe()}", flush=True)
    return optimizer


def steps(model: GPTMoE, optimizer: overspill.AdamW, work: Work) -> Iterator[torch.Tensor]:
    """Endless training steps on random tokens; yields the loss of each step."""
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(0)
    vocab = model.config.vocab
    pieces, rounds = (work.micro, 1) if work.grouped else (1, work.micro)
    while True:
        tokens = torch.randint(vocab, (work.batch, SEQ + 1), device=device, generator=generator)
        for number, part in enumerate(tokens.chunk(rounds)):
            last = number == rounds - 1
            with contextlib.nullcontext() if last else optimizer.accumulate():
                loss = model(part[:, :-1], part[:, 1:], pieces=pieces).loss / rounds
                loss.backward()
        optimizer.step()
        model.overspill.recorder.mark(STEP)
        optimizer.zero_grad()
        yield loss.detach()


def measure(
    model: GPTMoE,
    optimizer: overspill.AdamW,
    work: Work,
    warm: int,
    count: int,
    timeline: Path | None = None,
    traced: int = 2,
    title: str = "",
) -> Run:
    """Times steps of a GPTMoE on random tokens."""
    run, tokens = steps(model, optimizer, work), work.batch * SEQ
    return measure_steps(model.overspill, run, tokens, warm, count, timeline, traced, title)


def synchronize() -> None:
    """Waits for the GPU; no-op without one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_steps(
    run: Iterator[torch.Tensor], warm: int, count: int
) -> tuple[list[float], torch.Tensor]:
    """The seconds of each of `count` steps after `warm` steps, and the last loss. A step is timed
    from step() to step() on the GPU, which is not waited for in between, as in any training loop;
    updates that overlap the next forward are pending at both ends."""
    for _ in range(warm):
        next(run)
    synchronize()
    with short_collections():
        loss, marks = torch.zeros(()), [_Mark()]
        for _ in range(count):
            loss = next(run)
            marks.append(_Mark())
        synchronize()
    return [before.seconds_to(after) for before, after in itertools.pairwise(marks)], loss


class _Mark:
    """A point in time: the end of all queued work of the GPU, or now without a GPU."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def seconds_to(self, later: "_Mark") -> float:
        if self._event is None or later._event is None:
            return later._time - self._time
        return float(self._event.elapsed_time(later._event)) / 1e3


def measure_steps(
    engine: Engine,
    run: Iterator[torch.Tensor],
    tokens: int,
    warm: int,
    count: int,
    timeline: Path | None = None,
    traced: int = 2,
    title: str = "",
) -> Run:
    """Times `count` steps after `warm` steps, then traces further steps for the busy shares and,
    with `timeline`, a picture with that title."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds, loss = time_steps(run, warm, count)
    gpu = torch.cuda.max_memory_reserved()
    with short_collections():
        engine.recorder.start()
        began = time.perf_counter_ns()
        for _ in range(traced):
            next(run)
        synchronize()
        ended = time.perf_counter_ns()
        engine.recorder.stop()
    busy = engine.recorder.busy(began, ended)
    if timeline is not None:
        # an update that was cut off when the recorder was stopped before may have ended since
        spans = [span for span in engine.recorder.spans() if span.end_ns > began]
        write_perfetto(spans, timeline.with_name(f"{timeline.name}.json.gz"))
        heading = f"{title or timeline.name}: {traced} steps"
        draw_timeline(spans, timeline.with_name(f"{timeline.name}.png"), heading)
    engine.recorder.clear()
    host = peak_resident_memory()
    return Run(tokens, seconds, float(loss), gpu, host, busy, on_gpu_share(engine))


def on_gpu_share(engine: Engine) -> float:
    """The share of the experts that live on the compute device."""
    return sum(engine.residents) / (engine.n_layers * engine.experts.n_local)


def show(name: str, run: Run) -> None:
    speed = sorted(run.speed)[len(run.speed) // 2]
    busy = " ".join(f"{lane}={share:.2f}" for lane, share in run.busy.items() if share)
    print(
        f"{name}: {speed:,.0f} tok/s, steps {[round(s, 3) for s in run.seconds]}, loss "
        f"{run.loss:.3f}, GPU {run.gpu_bytes / 2**30:.1f} GiB, host {run.host_bytes / 1e9:.1f} GB; "
        f"{busy}",
        flush=True,
    )
