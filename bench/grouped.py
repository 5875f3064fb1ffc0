"""One wave of experts on a GPU: torch's grouped kernels, the Triton kernels, a loop over experts.

PYTHONPATH=src python3 bench/grouped.py
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from record import Limit, Metric, metric, write_record

from overspill.compute import grouped
from overspill.compute.experts import wave_backward, wave_forward
from overspill.core.experts import ExpertShape

W1, W2 = ExpertShape(1024, 4096, gated=True), ExpertShape(2048, 768, gated=True)
BF16, FP32 = torch.bfloat16, torch.float32
BATCH_SECONDS = 0.02  # of work that is timed at once


class Case(NamedTuple):
    name: str
    shape: ExpertShape
    experts: int
    rows: int
    """Token rows per expert."""
    dtype: torch.dtype


CASES = (
    Case("W1", W1, 16, 2048, BF16),
    Case("W1", W1, 16, 128, BF16),
    Case("W2", W2, 128, 256, BF16),
    Case("W2", W2, 128, 8, BF16),
    Case("W1", W1, 16, 2048, FP32),
    Case("W1", W1, 16, 128, FP32),
)


class Timing(NamedTuple):
    case: Case
    backend: grouped.Backend
    phase: str
    seconds: list[float]
    """One value per round."""

    def elements(self) -> int:
        """Elements of the matrices in all products; a product accesses each element once."""
        w_in, w_out = self.case.shape.in_numel, self.case.shape.out_numel
        # backward: the pre-activation again, its gradient, dx, and both dw
        one = w_in + w_out if self.phase == "forward" else 3 * w_in + 2 * w_out
        return self.case.experts * one

    def speed(self) -> Metric:
        flops = 2 * self.case.rows * self.elements()
        return metric([flops / seconds / 1e12 for seconds in self.seconds], "TFLOP/s")

    def bandwidth(self) -> float:
        """GB/s of weights and their gradients."""
        size = self.elements() * self.case.dtype.itemsize
        return size / statistics.median(self.seconds) / 1e9

    def row(self) -> dict[str, str]:
        case, speed = self.case, self.speed()
        return {
            "wave": f"{case.name}: {case.experts} × {case.shape.d_model}×{case.shape.d_hidden}, "
            f"{str(case.dtype).removeprefix('torch.')}",
            "rows each": f"{case.rows:,}",
            "pass": self.phase,
            "kernels": self.backend,
            "ms": f"{statistics.median(self.seconds) * 1e3:.3f}",
            "TFLOP/s": f"{speed.median:.1f} ({speed.low:.1f}–{speed.high:.1f})",
            "weights, GB/s": f"{self.bandwidth():,.0f}",
        }


def passes(case: Case) -> tuple[dict[str, Callable[[], None]], tuple[grouped.Backend, ...]]:
    """Forward and backward of a wave, and the backends that can compute them."""
    shape, n_rows = case.shape, case.experts * case.rows
    options = {"device": "cuda", "dtype": case.dtype}
    x, dy = (torch.randn(n_rows, shape.d_model, **options) for _ in range(2))
    weights = torch.randn(case.experts, shape.numel, **options).mul_(0.02)
    row_weight = torch.rand(n_rows, device="cuda")
    counts = [case.rows] * case.experts
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)

    def forward() -> None:
        wave_forward(x, weights, shape, ends, counts)

    def backward() -> None:
        wave_backward(x, dy, row_weight, weights, shape, ends, counts)

    usual = grouped.backend_for(x, weights, shape)
    backends: tuple[grouped.Backend, ...] = ("triton", "loop")
    if usual == "torch":
        backends = ("torch", *backends)
    return {"forward": forward, "backward": backward}, backends


def seconds(work: Callable[[], None], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def measure(case: Case, rounds: int) -> list[Timing]:
    """Alternates between the backends, so that noise affects all of them."""
    works, backends = passes(case)
    timings = []
    for phase, work in works.items():
        own = [Timing(case, backend, phase, []) for backend in backends]
        calls = {}
        for backend in backends:
            with grouped.forced(backend):
                seconds(work, 1)  # compiles
                calls[backend] = min(20, max(1, round(BATCH_SECONDS / seconds(work, 1))))
        for _ in range(rounds):
            for timing in own:
                with grouped.forced(timing.backend):
                    timing.seconds.append(seconds(work, calls[timing.backend]))
        timings += own
    return timings


def write(timings: list[Timing], rounds: int, out: Path | None) -> None:
    speeds = {t.backend: t.speed() for t in timings if t.case is CASES[0] and t.phase == "forward"}
    others = [f"{name} {speed.median:.0f}" for name, speed in speeds.items() if name != "triton"]
    config = {
        "row": "forward and backward of one wave of experts on the GPU, by kernel",
        "compare": f"W1 forward, TFLOP/s: {', '.join(others)}",
        "rounds": rounds,
    }
    metrics = {"triton": speeds["triton"], **speeds}
    limit = Limit(786.0, "TFLOP/s", "bf16 matrix product, measured")
    table = [timing.row() for timing in timings]
    write_record("grouped-triton", config, metrics, limit, out, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON record")
    args = parser.parse_args()
    timings = []
    for case in CASES:
        for timing in measure(case, args.rounds):
            print("  ".join(f"{value:<14}" for value in timing.row().values()), flush=True)
            timings.append(timing)
        torch.cuda.empty_cache()
    write(timings, args.rounds, args.out)


if __name__ == "__main__":
    main()
