"""Groups of experts for the CPU kernel, and the expected results by the naive reference."""

from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from overspill.compute.activation_form import Form, Function
from overspill.compute.cpu_kernel import (
    ISA_NAMES,
    BackwardRows,
    ExpertRows,
    cpu_isa,
    kernel_backward,
    kernel_forward,
)
from overspill.compute.experts import split_records
from overspill.compute.reference import moe_reference
from overspill.core.experts import ExpertShape
from tests.compute.activations import activation_oracle

BF16, FP32 = torch.bfloat16, torch.float32
# Relative to the largest value. float32: sums in another order. bf16: half an ulp of the result and
# of each earlier rounding that differs.
TOLERANCE = {FP32: 1e-5, BF16: 2**-7}

_BEST = cpu_isa()
ISAS = [] if _BEST is None else ISA_NAMES[: ISA_NAMES.index(_BEST) + 1]
needs_native = pytest.mark.skipif(not ISAS, reason="no C++ compiler")
every_isa = pytest.mark.parametrize("isa", ISAS)
every_dtype = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])


class Kind(NamedTuple):
    form: Form
    bias: bool
    transposed: bool = False

    def shape(self, d_model: int, d_hidden: int) -> ExpertShape:
        return ExpertShape(d_model, d_hidden, self.form.gated, self.bias, self.transposed)


KINDS = {
    "gelu": Kind(Form.usual(False), bias=False),
    "gated": Kind(Form.usual(True), bias=False),
    "squared relu": Kind(Form(Function.RELU2, False), bias=False),
    "relu with biases": Kind(Form(Function.RELU, False), bias=True),
    "gated relu with biases": Kind(Form(Function.RELU, True), bias=True),
    "transposed": Kind(Form.usual(False), bias=True, transposed=True),
    "clamped": Kind(Form(Function.CLAMPED, True), bias=False),
    "limited": Kind(Form(Function.LIMITED, True), bias=False),
    "clamped with biases, transposed": Kind(Form(Function.CLAMPED, True), True, True),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@dataclass(frozen=True)
class Group:
    x: Tensor
    dy: Tensor
    row_weight: Tensor
    experts: list[ExpertRows]
    shape: ExpertShape
    form: Form | None = None

    @classmethod
    def make(
        cls,
        shape: ExpertShape,
        counts: tuple[int, ...],
        dtype: torch.dtype = FP32,
        scale: float = 0.1,
        form: Form | None = None,
    ) -> "Group":
        n_rows, borders = sum(counts), [0, *accumulate(counts)]
        records = [(scale * torch.randn(shape.numel)).to(dtype) for _ in counts]
        return cls(
            torch.randn(n_rows, shape.d_model).to(dtype),
            torch.randn(n_rows, shape.d_model).to(dtype),
            torch.rand(n_rows),
            [ExpertRows(r, *ends) for r, ends in zip(records, pairwise(borders), strict=True)],
            shape,
            form,
        )


@dataclass(frozen=True)
class Results:
    y: Tensor
    dx: Tensor
    drow_weight: Tensor

    def named(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def assert_near(self, other: "Results", tolerance: float) -> None:
        for name, mine in self.named().items():
            theirs = other.named()[name].double()
            largest = max(1e-3, _max_abs(theirs))
            assert _max_abs(mine.double() - theirs) <= tolerance * largest, name

    def assert_equal(self, other: "Results") -> None:
        for name, mine in self.named().items():
            assert torch.equal(mine, other.named()[name]), name


def _max_abs(values: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(values.abs().max()) if values.numel() else 0.0


def compute(group: Group, isa: str | None = None, threads: int = 2) -> Results:
    """Computes into memory full of NaN: every result must be written."""
    y, dx = (torch.full_like(group.x, torch.nan) for _ in range(2))
    drow_weight = torch.full_like(group.row_weight, torch.nan)
    args = group.experts, group.shape, threads, isa, group.form
    kernel_forward(group.x, y, *args)
    kernel_backward(BackwardRows(group.x, group.dy, group.row_weight, dx, drow_weight), *args)
    return Results(y, dx, drow_weight)


def plain_weights(records: Tensor, shape: ExpertShape) -> list[Tensor]:
    """The tensors of records [n, numel]; matrices are as in `nn.Linear`."""
    tensors = split_records(records, shape)
    return [t.mT if shape.transposed and t.dim() == 3 else t for t in tensors]


def oracle(group: Group) -> Results:
    """The same in float64, differentiated by autograd."""
    shape, n_rows = group.shape, len(group.x)
    records = torch.stack([expert.record[: shape.numel].double() for expert in group.experts])
    w_in, w_out, *biases = plain_weights(records, shape)
    form = group.form or Form.usual(shape.gated)
    rest = w_in, w_out, shape.gated, biases, partial(activation_oracle, form=form)
    ids = torch.empty(n_rows, 1, dtype=torch.int64)
    for number, (_, start, stop) in enumerate(group.experts):
        ids[start:stop] = number
    x = group.x.double().requires_grad_()
    weights = group.row_weight.double().unsqueeze(1).requires_grad_()
    y = moe_reference(x, ids, torch.ones_like(weights), *rest).detach()
    weighted = moe_reference(x, ids, weights, *rest)
    dx, dweights = torch.autograd.grad(weighted, (x, weights), group.dy.double())
    return Results(y, dx, dweights[:, 0])
