"""Groups of experts to compute on the CPU, and the same by waves, as the oracle."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from overspill.compute.activation import Activation
from overspill.compute.cpu import cpu_backward, cpu_forward
from overspill.compute.cpu_kernel import BEST_ISA, ISA_NAMES, Segment, cpu_kernel_name
from overspill.compute.experts import wave_backward, wave_forward
from overspill.core.experts import ExpertShape

BF16, FP32 = torch.bfloat16, torch.float32
# Of the largest value: float32 sums in another order; half a bf16 step of the result, and of each
# rounding before it that fell the other way.
TOLERANCE = {FP32: 1e-5, BF16: 2**-7}

ISAS = [] if cpu_kernel_name() == "torch" else list(range(ISA_NAMES.index(cpu_kernel_name()) + 1))
needs_native = pytest.mark.skipif(not ISAS, reason="no C++ compiler")
every_isa = pytest.mark.parametrize("isa", ISAS, ids=[ISA_NAMES[isa] for isa in ISAS])
every_dtype = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
gated_or_not = pytest.mark.parametrize("gated", [False, True], ids=["gelu", "gated"])


@dataclass
class Group:
    x: Tensor
    dy: Tensor
    row_weight: Tensor
    records: list[Tensor]
    segments: list[Segment]
    shape: ExpertShape

    @classmethod
    def make(
        cls,
        shape: ExpertShape,
        counts: tuple[int, ...],
        dtype: torch.dtype = FP32,
        scale: float = 0.1,
    ) -> "Group":
        n_rows = sum(counts)
        records = [(scale * torch.randn(shape.numel)).to(dtype) for _ in counts]
        borders = [0, *accumulate(counts)]
        return cls(
            torch.randn(n_rows, shape.d_model).to(dtype),
            torch.randn(n_rows, shape.d_model).to(dtype),
            torch.rand(n_rows),
            records,
            [Segment(r, *ends) for r, ends in zip(records, pairwise(borders), strict=True)],
            shape,
        )

    def wide(self) -> "Group":
        records = [record.double() for record in self.records]
        segments = [
            segment._replace(record=r) for segment, r in zip(self.segments, records, strict=True)
        ]
        rows = (self.x.double(), self.dy.double(), self.row_weight.double())
        return Group(*rows, records, segments, self.shape)


@dataclass
class Results:
    y: Tensor
    dx: Tensor
    drow_weight: Tensor
    gradients: list[Tensor]
    squares: list[float]

    def named(self) -> dict[str, Tensor]:
        rows = {"y": self.y, "dx": self.dx, "drow_weight": self.drow_weight}
        return rows | {f"gradient {i}": grad for i, grad in enumerate(self.gradients)}

    def assert_near(self, other: "Results", tolerance: float) -> None:
        for name, mine in self.named().items():
            theirs = other.named()[name].double()
            largest = max(1e-3, float_max(theirs))
            assert float_max(mine.double() - theirs) <= tolerance * largest, name

    def assert_equal(self, other: "Results") -> None:
        for name, mine in self.named().items():
            assert torch.equal(mine, other.named()[name]), name
        assert self.squares == other.squares


def float_max(values: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(values.abs().max()) if values.numel() else 0.0


def compute(
    group: Group,
    isa: int = BEST_ISA,
    threads: int = 2,
    frozen: bool = False,
    activation: Activation | None = None,
) -> Results:
    """By cpu_forward and cpu_backward, into memory full of NaN: everything must be written."""
    args = (group.segments, group.shape, activation, threads)
    y, dx = (torch.full_like(group.x, torch.nan) for _ in range(2))
    drow_weight = torch.full_like(group.row_weight, torch.nan)
    gradients = None if frozen else [torch.full_like(r, torch.nan) for r in group.records]
    cpu_forward(group.x, y, *args, isa=isa)
    squares = cpu_backward(
        group.x, group.dy, group.row_weight, dx, drow_weight, *args, gradients, isa=isa
    )
    return Results(y, dx, drow_weight, gradients or [], squares)


def by_waves(group: Group, frozen: bool = False, activation: Activation | None = None) -> Results:
    """The same by waves of one expert each."""
    results = Results(
        torch.empty_like(group.x),
        torch.empty_like(group.x),
        torch.empty(len(group.x), dtype=torch.float64),
        [],
        [],
    )
    for record, start, stop in group.segments:
        rows, n = slice(start, stop), stop - start
        args = (group.shape, torch.tensor([n], dtype=torch.int32), [n])
        own = record.unsqueeze(0)
        results.y[rows] = wave_forward(group.x[rows], own, *args, activation)[0]
        grads = wave_backward(
            group.x[rows],
            group.dy[rows],
            group.row_weight[rows],
            own,
            *args,
            activation=activation,
        )
        results.dx[rows] = grads.dx_RD
        results.drow_weight[rows] = grads.drow_weight_R.double()
        if not frozen:
            results.gradients.append(torch.cat([part.flatten() for part in grads.dw]))
    return results
