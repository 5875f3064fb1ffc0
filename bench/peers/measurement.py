"""Shared parts of both sides of a peer benchmark: the shapes, the timing, and one line of JSON for
each measurement, which the driver reads."""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from workload import SEQ, time_steps

from overspill.hardware.machine import peak_resident_memory
from overspill.models.config import GPTConfig
from overspill.models.presets import get_preset

MAX_NORM = 1.0
_KEY = "measurement"


@dataclass(frozen=True)
class Work:
    """Training steps of `batch` sequences; `mode` is offload or gpu (everything on the GPU)."""

    mode: str
    batch: int
    clip: bool


@dataclass(frozen=True)
class Measurement:
    """The timed steps of one side. The driver fills in `run` and `round`: measurements with the
    same values of both are a pair."""

    side: str
    work: Work
    tokens: int
    seconds: list[float]
    loss: float
    gpu_bytes: int
    host_bytes: int
    version: str
    settings: dict[str, Any] = field(default_factory=dict)
    on_gpu: float = 0.0  # share of the experts whose home is the GPU
    run: str = ""
    round: int = 0

    @property
    def speeds(self) -> list[float]:
        return [self.tokens / seconds for seconds in self.seconds]

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    def to_line(self) -> str:
        return json.dumps({_KEY: asdict(self)})


def from_line(line: str) -> Measurement | None:
    """The measurement of a line of output, or None if the line is something else."""
    if not line.startswith(f'{{"{_KEY}"'):
        return None
    fields = json.loads(line)[_KEY]
    return Measurement(**{**fields, "work": Work(**fields["work"])})


@dataclass(frozen=True)
class Options:
    """Work of a child process."""

    mode: str
    batches: list[int]
    warm: int
    steps: int
    tiny: bool

    @property
    def config(self) -> GPTConfig:
        if self.tiny:
            return get_preset("w1", n_layers=2, d_model=64, d_hidden=128, n_heads=4, n_experts=4)
        return get_preset("w1")

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def to_arguments(self) -> list[str]:
        batches = ",".join(map(str, self.batches))
        line = f"--mode {self.mode} --batches {batches} --warm {self.warm} --steps {self.steps}"
        return line.split() + ["--tiny"] * self.tiny


def child_options() -> Options:
    """The options from the command line of a child process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("offload", "gpu"), required=True)
    parser.add_argument("--batches", required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    batches = [int(text) for text in args.batches.split(",")]
    return Options(args.mode, batches, args.warm, args.steps, args.tiny)


def measure(
    side: str,
    work: Work,
    run: Iterator[torch.Tensor],
    options: Options,
    version: str,
    settings: dict[str, Any],
    on_gpu: Callable[[], float] = lambda: 0.0,
) -> None:
    """Times steps of `run` and prints the measurement as a line of JSON. `on_gpu` says afterwards
    which share of the experts stays on the GPU."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()  # else the peak of larger batches before counts
        torch.cuda.reset_peak_memory_stats()
    seconds, loss = time_steps(run, options.warm, options.steps)
    if not loss.isfinite():
        raise RuntimeError(f"{side}: the loss is {float(loss)} after {work}")
    measured = Measurement(
        side=side,
        work=work,
        tokens=work.batch * SEQ,
        seconds=seconds,
        loss=float(loss),
        gpu_bytes=torch.cuda.max_memory_reserved() if cuda else 0,
        host_bytes=peak_resident_memory(),
        version=version,
        settings=settings,
        on_gpu=on_gpu(),
    )
    print(measured.to_line(), flush=True)
