"""Weight gradients that the CPU kernel forms in place, compared with float64, for each instruction
set of this machine."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from overspill.compute.activation_form import Form
from overspill.compute.cpu_kernel import (
    BackwardRows,
    GradientKind,
    WeightGradient,
    kernel_backward,
)
from overspill.compute.experts import split_records
from overspill.compute.reference import moe_reference
from overspill.core.experts import ExpertShape
from tests.compute.activations import activation_oracle
from tests.compute.groups import (
    FP32,
    TOLERANCE,
    Group,
    Kind,
    every_dtype,
    every_isa,
    every_kind,
    needs_native,
    plain_weights,
)

pytestmark = needs_native

# Around blocks of 128 hidden units and columns, 32 rows of a gradient, and sums of 8, 4 and 1 rows.
SIZES = [
    (64, 160, (5, 0, 20)),
    (33, 47, (1, 17, 3)),
    (300, 129, (2, 60)),
    (1, 1, (2,)),
]


class Formed(NamedTuple):
    """The results of a backward with weight gradients."""

    dx: Tensor
    drow_weight: Tensor
    dw: Tensor  # [experts, numel]
    squares: Tensor


def form(group: Group, isa: str | None, before: Tensor | None = None, threads: int = 2) -> Formed:
    """Overwrites memory full of NaN, or adds to the gradients `before`."""
    n = len(group.experts), group.shape.numel
    dw = torch.full(n, torch.nan, dtype=group.x.dtype) if before is None else before.clone()
    squares = torch.full((n[0],), torch.nan)
    dx, drow_weight = (
        torch.full_like(group.x, torch.nan),
        torch.full_like(group.row_weight, torch.nan),
    )
    kind = GradientKind.FORMED if before is None else GradientKind.ADDED
    places = [WeightGradient(dw[i], squares[i], kind) for i in range(n[0])]
    rows = BackwardRows(group.x, group.dy, group.row_weight, dx, drow_weight)
    kernel_backward(rows, group.experts, group.shape, threads, isa, group.form, places)
    return Formed(dx, drow_weight, dw, squares)


def oracle(group: Group) -> Tensor:
    """The weight gradients in float64, by autograd."""
    shape = group.shape
    records = torch.stack([e.record.double() for e in group.experts]).requires_grad_()
    w_in, w_out, *biases = plain_weights(records, shape)
    ids = torch.empty(len(group.x), 1, dtype=torch.int64)
    for number, (_, start, stop) in enumerate(group.experts):
        ids[start:stop] = number
    act = partial(activation_oracle, form=group.form or Form.usual(shape.gated))
    weights = group.row_weight.double().unsqueeze(1)
    y = moe_reference(group.x.double(), ids, weights, w_in, w_out, shape.gated, biases, act)
    (dw,) = torch.autograd.grad(y, records, group.dy.double())
    return dw


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    largest = expected.abs().max().clamp(min=1e-3)
    assert (got.double() - expected).abs().max() <= 2 * TOLERANCE[dtype] * largest


@every_isa
@every_dtype
@every_kind
@pytest.mark.parametrize(("d_model", "d_hidden", "counts"), SIZES)
def test_weight_gradients_and_their_norms_follow_float64(
    isa: str, dtype: torch.dtype, kind: Kind, d_model: int, d_hidden: int, counts: tuple[int, ...]
) -> None:
    group = Group.make(kind.shape(d_model, d_hidden), counts, dtype, form=kind.form)
    got, expected = form(group, isa), oracle(group)
    busy = [number for number, count in enumerate(counts) if count]
    for number in busy:
        parts = split_records(got.dw[number : number + 1], group.shape)
        exact = split_records(expected[number : number + 1], group.shape)
        for part, other in zip(parts, exact, strict=True):
            assert_near(part, other, dtype)
    squares = got.dw[busy].double().square().sum(1)
    torch.testing.assert_close(got.squares[busy].double(), squares, rtol=1e-5, atol=1e-9)
    idle = [number for number in range(len(counts)) if number not in busy]
    assert got.dw[idle].isnan().all(), "an expert without token rows has no gradient"
    assert got.squares[idle].isnan().all()


@every_isa
@every_dtype
def test_a_gradient_is_added_with_the_rounding_of_torch(isa: str, dtype: torch.dtype) -> None:
    group = Group.make(ExpertShape(70, 150, True, bias=True), (5, 33), dtype)
    before = torch.randn(2, group.shape.numel).to(dtype)
    alone, added = form(group, isa), form(group, isa, before)
    assert torch.equal(added.dw, before + alone.dw)
    squares = added.dw.double().square().sum(1)
    torch.testing.assert_close(added.squares.double(), squares, rtol=1e-5, atol=0.0)


@every_isa
@every_dtype
def test_nothing_else_depends_on_weight_gradients_and_they_not_on_threads(
    isa: str, dtype: torch.dtype
) -> None:
    group = Group.make(ExpertShape(96, 300, True, bias=True), (60, 1, 20), dtype)
    dx, drow_weight = torch.empty_like(group.x), torch.empty_like(group.row_weight)
    rows = BackwardRows(group.x, group.dy, group.row_weight, dx, drow_weight)
    kernel_backward(rows, group.experts, group.shape, 2, isa)
    first = form(group, isa, threads=1)
    assert torch.equal(first.dx, dx)
    assert torch.equal(first.drow_weight, drow_weight)
    for mine, theirs in zip(form(group, isa, threads=5), first, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_shows_in_its_norm(bad: float) -> None:
    group = Group.make(ExpertShape(40, 40, False), (3, 3), FP32)
    group.dy[1, 5] = bad
    squares = form(group, None).squares
    assert not squares[0].isfinite()
    assert squares[1].isfinite()
