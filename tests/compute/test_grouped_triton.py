"""The grouped Triton kernels compared with a naive loop, in Triton's interpreter and on a GPU."""

import importlib.util
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from overspill.compute import grouped
from tests.compute.waves import LAYOUTS, N_EXPERTS, Case, by_autograd, by_waves
from tests.slow import slow_rows

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
BF16, FP32 = torch.bfloat16, torch.float32
# Relative to the largest value: float32 sums in another order, and one rounding to bf16. TF32 has
# errors of 1e-3.
TOLERANCE = {FP32: 1e-5, BF16: 2**-7}

every_dtype = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
every_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="Triton compiles for the GPU (run with -m gpu)"
            ),
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
COUNTS = {
    "ragged": (5, 0, 30, 1, 0),
    "one group of several tiles": (150,),
    "one row": (0, 1),
    "tiles of 64 rows": (64, 65, 63),
    "no rows": (0, 0),
}


def ends_of(counts: Sequence[int], device: str) -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


def rows_of(counts: Sequence[int]) -> Iterator[slice]:
    return (slice(start, stop) for start, stop in pairwise([0, *accumulate(counts)]))


def matrix(rows: int, columns: int, dtype: torch.dtype, device: str, behind: int = 2) -> Tensor:
    """Strided rows, and NaN in the rows after the last group."""
    values = torch.randn(rows + behind, columns + 3).to(device, dtype)
    values[rows:] = float("nan")
    return values[:, :columns]


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype is dtype
    assert got.shape == expected.shape
    if expected.numel():
        error = (got.double() - expected).abs().max()
        assert error <= TOLERANCE[dtype] * expected.abs().max()


def check_product(
    counts: Sequence[int], k: int, n: int, dtype: torch.dtype, device: str, transposed: bool
) -> None:
    a = matrix(sum(counts), k, dtype, device)
    records = torch.randn(len(counts), k * n + 8).to(device, dtype)[:, : k * n]
    w = records.unflatten(1, (n, k)).transpose(1, 2) if transposed else records.unflatten(1, (k, n))
    c = grouped.product("triton", a, w, ends_of(counts, device))
    for group, rows in enumerate(rows_of(counts)):
        assert_near(c[rows], a[rows].double() @ w[group].double(), dtype)


def check_weight_grad(
    counts: Sequence[int], m: int, n: int, dtype: torch.dtype, device: str
) -> None:
    a, b = (matrix(sum(counts), columns, dtype, device) for columns in (m, n))
    dw = grouped.weight_grad("triton", a, b, ends_of(counts, device), counts)
    for group, rows in enumerate(rows_of(counts)):
        assert_near(dw[group], a[rows].double().t() @ b[rows].double(), dtype)


@every_device
@every_dtype
@pytest.mark.parametrize("case", COUNTS)
def test_each_group_is_multiplied_by_its_matrix(case: str, dtype: torch.dtype, device: str) -> None:
    for transposed in (False, True):
        check_product(COUNTS[case], 40, 70, dtype, device, transposed)


@every_device
@every_dtype
def test_sums_can_fill_whole_blocks(dtype: torch.dtype, device: str) -> None:
    check_product((3, 9), 128, 128, dtype, device, transposed=True)
    check_weight_grad((64,), 128, 128, dtype, device)


@every_device
def test_there_can_be_many_groups(device: str) -> None:
    check_product((2, *[0] * 130, 7), 16, 8, FP32, device, transposed=False)


@every_device
@every_dtype
@pytest.mark.parametrize("case", COUNTS)
def test_the_weight_gradient_sums_over_the_rows_of_its_group(
    case: str, dtype: torch.dtype, device: str
) -> None:
    check_weight_grad(COUNTS[case], 24, 70, dtype, device)


@every_device
@every_dtype
@pytest.mark.parametrize("size", [(3, 5), (70, 90)], ids=["one block", "several blocks"])
def test_groups_without_rows_are_set_to_zero_and_others_are_kept(
    size: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    from overspill.compute import grouped_triton

    counts = (0, 4, 0, 0, 7, 0)
    dw = torch.randn(len(counts), *size).to(device, dtype)
    dw[0] = float("nan")
    expected = dw * torch.tensor(counts, device=device).bool().view(-1, 1, 1)
    expected[0] = 0
    grouped_triton.zero_empty(dw, ends_of(counts, device))
    assert torch.equal(dw, expected)


@every_device
@pytest.mark.parametrize(
    "layout", slow_rows([{"gated": False}, *LAYOUTS.values()], 1, 2), ids=["gelu", *LAYOUTS]
)
def test_waves_follow_autograd(layout: dict, device: str) -> None:
    case = Case.make("some without tokens", device=device, n_tokens=23, **layout)
    with grouped.forced("triton"):
        got = by_waves(case, (0, 1, N_EXPERTS), host_counts=False)
    # On a GPU the fused activation, with its approximate exponentials, is part of the wave.
    tolerance = 1e-5 if device == "cpu" else 1e-4
    got.assert_close(by_autograd(case), rtol=tolerance, atol=tolerance)


@every_device
def test_bf16_waves_follow_float32_autograd(device: str) -> None:
    # sizes that torch's kernels do not support
    case = Case.make(dtype=BF16, device=device, d_model=20, d_hidden=36, n_tokens=23)
    with grouped.forced("triton"):
        got = by_waves(case)
    expected = by_autograd(case.wide())
    for name, mine in got.named().items():
        theirs = expected.named()[name]
        assert (mine.float() - theirs).abs().max() <= 2e-2 * theirs.abs().max(), name


@pytest.mark.gpu
def test_weights_can_have_more_than_two_to_the_31_elements() -> None:
    k, n = 1024, 2048
    counts = [0] * (2**31 // (k * n) + 1) + [40]
    weights = torch.zeros(len(counts), k, n, dtype=BF16, device="cuda")
    last = weights[-1].copy_(torch.randn(k, n))
    a, b = (torch.randn(40, columns, device="cuda").to(BF16) for columns in (k, n))
    ends = ends_of(counts, "cuda")
    assert_near(grouped.product("triton", a, weights, ends), a.double() @ last.double(), BF16)
    dw = grouped.weight_grad("triton", a, b, ends, counts)
    assert_near(dw[-1], a.double().t() @ b.double(), BF16)
    assert not dw[:-1].any()


@pytest.mark.gpu
def test_float32_follows_the_precision_set_for_torch() -> None:
    a, w = torch.randn(200, 256, device="cuda"), torch.randn(1, 256, 64, device="cuda")
    exact = a.double() @ w[0].double()
    torch.set_float32_matmul_precision("high")
    try:
        rough = grouped.product("triton", a, w, ends_of([200], "cuda"))
    finally:
        torch.set_float32_matmul_precision("highest")
    error = (rough - exact).abs().max() / exact.abs().max()
    assert 1e-5 < error < 1e-2
