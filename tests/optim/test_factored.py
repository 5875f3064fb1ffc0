"""Gradients that are given by their factors, compared with those that the backward of CPU experts
forms, for each instruction set of this machine."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from overspill.compute.cpu_kernel import (
    BackwardRows,
    GradientKind,
    WeightGradient,
    factor_row_bytes,
    kernel_backward,
)
from overspill.optim.arguments import AdamHyper, RecordState
from overspill.optim.factored import Factors, adamw_factored_, form_gradient, square_of
from overspill.optim.kernel import ISA_NAMES, adamw_, join_master, kernel_name, split_master_
from tests.compute.groups import FP32, KINDS, Group, Kind, every_dtype, every_kind, needs_native

pytestmark = needs_native
ISAS = range(ISA_NAMES.index(kernel_name()) + 1) if kernel_name() != "torch" else ()
every_isa = pytest.mark.parametrize("isa", ISAS)

# Around pieces of 32 rows and 2,048 columns, blocks of 128 units, and products of four rows.
SIZES = [
    (64, 160, (5, 1, 0, 20)),
    (33, 47, (1, 17, 3)),
    (2050, 3, (4,)),
    (1, 1, (2,)),
]
HYPER = AdamHyper(1e-2, 0.9, 0.95, eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.3)
BIASED = KINDS["gated relu with biases"]


class Left(NamedTuple):
    """What two backwards with the same rows have left for each expert."""

    factors: list[Factors]
    formed: list[Tensor]


def left_by(group: Group, threads: int = 2) -> Left:
    """The results of token rows do not depend on it."""
    sizes = [expert.stop - expert.start for expert in group.experts]
    row = factor_row_bytes(group.shape, group.x.dtype) // group.x.itemsize
    memory = [torch.full((size * row,), torch.nan, dtype=group.x.dtype) for size in sizes]
    formed = [torch.zeros(group.shape.numel, dtype=group.x.dtype) for _ in sizes]
    square, results = torch.full((1,), torch.nan), []
    for kind, places in ((GradientKind.FACTORED, memory), (GradientKind.FORMED, formed)):
        dx, drow_weight = torch.empty_like(group.x), torch.empty_like(group.row_weight)
        rows = BackwardRows(group.x, group.dy, group.row_weight, dx, drow_weight)
        gradients = [WeightGradient(place, square, kind) for place in places]
        args = group.experts, group.shape, threads, None, group.form, gradients
        kernel_backward(rows, *args)
        results.append((dx, drow_weight))
        assert kind is GradientKind.FORMED or square.isnan(), "the optimizer knows it"
    torch.testing.assert_close(*results, rtol=0.0, atol=0.0, equal_nan=True)
    both = zip(memory, sizes, strict=True)
    return Left([Factors(place, size, group.shape) for place, size in both], formed)


@every_isa
@every_dtype
@every_kind
@pytest.mark.parametrize(("d_model", "d_hidden", "counts"), SIZES)
def test_factors_are_the_gradient_that_is_formed(
    isa: int, dtype: torch.dtype, kind: Kind, d_model: int, d_hidden: int, counts: tuple[int, ...]
) -> None:
    found = left_by(Group.make(kind.shape(d_model, d_hidden), counts, dtype, form=kind.form))
    for factors, formed in zip(*found, strict=True):
        got = torch.full_like(formed, torch.nan)
        square = form_gradient(factors, got, 2, isa)
        largest = float(formed.abs().max()) + 1e-6
        torch.testing.assert_close(got, formed, rtol=1e-2, atol=1e-5 * largest)
        if dtype == FP32:
            torch.testing.assert_close(got, formed, rtol=1e-5, atol=1e-6 * largest)
        exact = float(got.double().square().sum())
        assert square == pytest.approx(exact, rel=1e-5, abs=1e-12)
        rel = 1e-5 if dtype == FP32 else 1e-2
        assert square_of(factors, 2, isa) == pytest.approx(exact, rel=rel, abs=1e-12)


def naive_gradient(factors: Factors) -> Tensor:
    """In float32, by products in float64."""
    memory, rows, shape = factors
    d, h = shape.d_model, shape.d_hidden
    row_bytes = factor_row_bytes(shape, memory.dtype)
    table = memory.view(torch.uint8).view(rows, row_bytes)
    numbers = (2 * d + shape.in_rows + h) * memory.itemsize
    x, dy, dh, a = (
        part.double()
        for part in table[:, :numbers].view(memory.dtype).split([d, d, shape.in_rows, h], dim=1)
    )
    first = -(-numbers // 4) * 4
    weights = table[:, first : first + 4].view(torch.float32).double()
    matrices = (x.T @ dh, a.T @ dy) if shape.transposed else (dh.T @ x, dy.T @ a)
    parts = [*matrices, dh.sum(0), (weights * dy).sum(0)]
    return torch.cat([part.flatten() for part in parts[: len(shape.sizes)]]).float()


@every_isa
@every_dtype
@pytest.mark.parametrize("moments", [FP32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gated relu with biases", "clamped with biases, transposed"])
@pytest.mark.parametrize("sizes", [(70, 150), (1024, 65), (33, 2100)])
def test_the_step_is_that_of_the_naive_gradient_in_float32(
    isa: int, dtype: torch.dtype, moments: torch.dtype, sizes: tuple[int, int], kind: str
) -> None:
    shape, form = KINDS[kind].shape(*sizes), KINDS[kind].form
    (factors,), _ = left_by(Group.make(shape, (19,), dtype, form=form))
    master, moment = torch.randn(2, factors.shape.numel)
    exp_avg, exp_avg_sq = moment.to(moments), (moment.square() + 1e-2).to(moments)
    expected = RecordState(master, None, exp_avg.clone(), exp_avg_sq.clone())
    state = RecordState(master.clone(), None, exp_avg, exp_avg_sq)
    if dtype != FP32:
        low = torch.empty_like(master, dtype=torch.int16)
        state = RecordState(torch.empty_like(master, dtype=dtype), low, exp_avg, exp_avg_sq)
        split_master_(master, state.weight, low)
    adamw_(expected, naive_gradient(factors), HYPER)
    adamw_factored_(state, factors, HYPER, 2, isa)
    got = state.weight if state.low is None else join_master(state.weight, state.low)
    torch.testing.assert_close(got, expected.weight, rtol=1e-5, atol=1e-6)
    rtol = 1e-5 if moments == FP32 else 2**-7  # a sum in another order may be rounded the other way
    torch.testing.assert_close(state.exp_avg, expected.exp_avg, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(state.exp_avg_sq, expected.exp_avg_sq, rtol=rtol, atol=1e-6)


@every_dtype
def test_nothing_depends_on_threads(dtype: torch.dtype) -> None:
    group = Group.make(BIASED.shape(300, 300), (21,), dtype, form=BIASED.form)
    results = []
    for threads in (1, 5):
        (factors,), _ = left_by(group, threads)
        into = torch.empty(factors.shape.numel, dtype=dtype)
        square = form_gradient(factors, into, threads)
        state = RecordState(
            torch.ones_like(into),
            None if dtype == FP32 else torch.zeros_like(into, dtype=torch.int16),
            torch.zeros(len(into)),
            torch.zeros(len(into)),
        )
        adamw_factored_(state, factors, HYPER, threads)
        results.append((square, square_of(factors, threads), into, state.weight, state.exp_avg))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_factors_that_are_not_finite_show_in_the_norm(bad: float) -> None:
    group = Group.make(KINDS["gelu"].shape(40, 40), (3, 3), FP32)
    group.dy[1, 5] = bad
    squares = [square_of(factors) for factors in left_by(group).factors]
    assert not torch.tensor(squares[0]).isfinite()
    assert torch.tensor(squares[1]).isfinite()
