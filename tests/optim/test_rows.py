"""AdamW on parts of several records at once, and the guard against gradients that are not finite:
the C++ kernel, the Triton kernel (in its interpreter without a GPU) and torch's operations."""

import importlib.util
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from overspill.optim import kernel
from overspill.optim.arguments import AdamHyper, RecordState, adam_scalars
from overspill.optim.kernel import adamw_
from tests.slow import slow_rows

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [(weight, moments) for weight in (FP32, BF16) for moments in (FP32, BF16)]
HYPER = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
NUMEL = 2500  # three blocks of the Triton kernel

every_kind = pytest.mark.parametrize(("weight", "moments"), KINDS)


@dataclass(frozen=True)
class Way:
    """One implementation, called as `adamw_` is."""

    device: str
    triton: bool = False

    @property
    def cuts(self) -> list[int]:
        """Where a record is divided; without Triton at multiples of 64."""
        return [0, 1100, 1101, NUMEL] if self.triton else [0, 1088, 1152, NUMEL]

    def update(
        self,
        state: RecordState,
        grad: Tensor | None,
        start: int = 0,
        guard: Tensor | None = None,
    ) -> None:
        if self.device == "cuda" or not self.triton:
            adamw_(state, grad, HYPER, start=start, not_finite=guard)
            return
        from overspill.optim.gpu_kernel import adamw_cuda_

        adamw_cuda_(state, grad, adam_scalars(HYPER), start, guard)


def _no_library() -> None:
    return None


@pytest.fixture(
    params=[
        "cpu",
        "cpu without a compiler",
        "interpreter",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cuda without triton", marks=pytest.mark.gpu),
    ]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    device, _, missing = request.param.partition(" without ")
    if missing == "a compiler":
        monkeypatch.setattr(kernel, "native_library", _no_library)
    if missing == "triton":
        monkeypatch.setattr(kernel, "has_triton", lambda what: False)
    if device == "cuda" and not missing:
        pytest.importorskip("triton")
    if device == "interpreter":
        if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
            pytest.skip("needs Triton's interpreter, which serves machines without a GPU")
        return Way("cpu", triton=True)
    return Way(device, triton=device == "cuda" and not missing)


def records(count: int, weight: torch.dtype, moments: torch.dtype, device: str) -> RecordState:
    """Stacked records, with states as after some steps."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(3, count, NUMEL, generator=generator)
    low = torch.randint(-(2**15), 2**15, (count, NUMEL), generator=generator)
    return RecordState(
        values[0].to(device, weight),
        low.to(device, torch.int16) if weight == BF16 else None,
        values[1].to(device, moments),
        values[2].square().to(device, moments),
    )


def part_of(state: RecordState, rows: slice | int, columns: slice) -> RecordState:
    return RecordState(*(None if t is None else t[rows, columns] for t in state))  # type: ignore[arg-type]


def copy_of(state: RecordState) -> RecordState:
    return RecordState(*(None if t is None else t.clone() for t in state))  # type: ignore[arg-type]


def gradient(count: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, NUMEL, generator=generator).to(device, dtype)


def assert_equal(mine: RecordState, theirs: RecordState) -> None:
    for one, other in zip(mine, theirs, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@every_kind
@pytest.mark.parametrize("has_grad", [True, False])
def test_the_division_of_records_changes_no_bit(
    way: Way, weight: torch.dtype, moments: torch.dtype, has_grad: bool
) -> None:
    whole = records(4, weight, moments, way.device)
    divided, before = copy_of(whole), copy_of(whole)
    grad = gradient(2, weight, way.device)
    for row in (1, 2):
        one = part_of(whole, row, slice(None))
        way.update(one, grad[row - 1] if has_grad else None)
    for start, stop in itertools.pairwise(way.cuts):
        own = grad[:, start:stop]
        if start == 0:
            own = own.contiguous()  # has another stride between records
        part = part_of(divided, slice(1, 3), slice(start, stop))
        way.update(part, own if has_grad else None, start)
    assert_equal(divided, whole)
    assert (divided.weight[1:3] != before.weight[1:3]).any(0).float().mean() > 0.9
    for row in (0, 3):
        other = slice(row, row + 1)
        assert_equal(*(part_of(state, other, slice(None)) for state in (divided, before)))


@every_kind
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_guard_that_is_set_leaves_everything_unchanged(
    way: Way, weight: torch.dtype, moments: torch.dtype, has_grad: bool
) -> None:
    state = records(2, weight, moments, way.device)
    before = copy_of(state)
    guard = torch.ones((), dtype=torch.int32, device=way.device)
    way.update(state, gradient(2, weight, way.device) if has_grad else None, guard=guard)
    assert_equal(state, before)
    assert guard.item() == 1


@every_kind
def test_finite_gradients_pass_the_guard(
    way: Way, weight: torch.dtype, moments: torch.dtype
) -> None:
    guarded = records(2, weight, moments, way.device)
    free = copy_of(guarded)
    guard = torch.zeros((), dtype=torch.int32, device=way.device)
    grad = gradient(2, weight, way.device)
    grad[1, 7] = 1e15
    way.update(guarded, grad, guard=guard)
    way.update(guarded, None, guard=guard)
    way.update(free, grad)
    way.update(free, None)
    assert_equal(guarded, free)
    assert guard.item() == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("value", slow_rows([float("nan"), float("inf"), -float("inf"), 1e30], 1))
@pytest.mark.parametrize("weight", [FP32, BF16])
@pytest.mark.parametrize("at", [(0, 0), (1, NUMEL - 1)])
def test_one_number_that_is_not_finite_sets_the_guard(
    way: Way, value: float, weight: torch.dtype, at: tuple[int, int]
) -> None:
    """Also one whose square is not: the norm would be infinite."""
    state = records(2, weight, FP32, way.device)
    guard = torch.zeros((), dtype=torch.int32, device=way.device)
    grad = gradient(2, weight, way.device)
    grad[at] = value
    way.update(state, grad, guard=guard)
    assert guard.item() == 1
    after = copy_of(state)
    way.update(state, gradient(2, weight, way.device), guard=guard)
    assert_equal(state, after)
