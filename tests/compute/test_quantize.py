"""Packed matrices against searches in plain Python, and the bounds of their errors."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from overspill.compute import quantize as module
from overspill.compute.packed_matrix import PackedMatrix
from overspill.compute.quantize import BadWeight, quantize, quantize_groups, quantize_groups_torch
from overspill.core.packing import QUANTIZATIONS, Kind, Scheme
from tests.models.huggingface.packed.naive import e2m1

WEIGHTS = st.floats(-(2.0**126), 2.0**126, width=32)
NEAR = st.floats(-8, 8, width=32)
HALVES = st.integers(-24, 24).map(lambda n: n / 4)
GROUPS = st.one_of(*(st.lists(each, min_size=32, max_size=32) for each in (WEIGHTS, NEAR, HALVES)))
E2M1 = [e2m1(code) for code in range(16)]
ZEROS = [0.0] * 32
SLACK = 1 + 1e-5
"""Errors are compared in float32."""


def unpacked(weight: Tensor, name: str) -> Tensor:
    out = torch.empty_like(weight)
    scheme = QUANTIZATIONS[name]
    PackedMatrix(scheme, *weight.shape).unpack(quantize(weight, scheme), out)
    return out


def squared(values: Sequence[float], group: Sequence[float]) -> float:
    unit = max(map(abs, group)) or 1.0
    return math.fsum(((a - b) / unit) ** 2 for a, b in zip(values, group, strict=True))


@settings(max_examples=25)
@given(GROUPS)
@example(ZEROS)
@example([2.0**-149] * 32)
@example([1.7e38, -1.7e38] * 16)
def test_mxfp4_takes_the_better_of_two_scales(group: list[float]) -> None:
    found = unpacked(torch.tensor([group]), "mxfp4")[0].tolist()
    largest = max(map(abs, group))
    if largest == 0:
        assert found == ZEROS
        return
    lower = max(math.frexp(largest)[1] - 3, -127)
    errors = []
    for exponent in (lower, lower + 1):
        values = [code * 2.0**exponent for code in E2M1]
        nearest = [min(values, key=lambda value: abs(value - weight)) for weight in group]
        errors.append(squared(nearest, group))
    assert squared(found, group) <= min(errors) * SLACK + 1e-14
    # twice the OCP scale cuts off nothing: its error is at most half of the largest difference, 2
    assert squared(found, group) <= 32 * (2.0 ** (lower + 1) / largest) ** 2 * SLACK


@settings(max_examples=25)
@given(GROUPS)
@example(ZEROS)
@example([2.0**-149] * 32)
@example([1.7e38, -1.7e38] * 16)
def test_int4_takes_the_best_scale(group: list[float]) -> None:
    found = unpacked(torch.tensor([group]), "int4")[0].tolist()
    largest = max(map(abs, group))
    errors = []
    for divisor in module._DIVISORS:
        scale = max(torch.tensor(largest / divisor).bfloat16().item(), 2.0**-126)
        nearest = [scale * min(max(round(weight / scale), -8), 7) for weight in group]
        errors.append(squared(nearest, group))
    assert squared(found, group) <= min(errors) * SLACK + 1e-12
    # the largest weight is 7 with the first scale: no error is beyond half of it
    half = max(torch.tensor(largest / 7).bfloat16().item(), 2.0**-126) / 2
    assert squared(found, group) <= 32 * (half / (largest or 1.0)) ** 2 * SLACK + 1e-12


@settings(max_examples=20)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(-40, 40))
def test_fp8_rounds_by_a_sixteenth_at_most(rows: int, columns: int, power: int) -> None:
    weight = torch.randn(rows, columns) * torch.randn(1, columns).mul(3).exp2() * 2.0**power
    parts = quantize(weight, QUANTIZATIONS["fp8"])
    assert parts.codes.dtype == torch.float8_e4m3fn
    assert parts.scales.shape == (math.ceil(rows / 128), math.ceil(columns / 128))
    scales = parts.scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    error = (unpacked(weight, "fp8") - weight).abs()
    # e4m3 has three bits of mantissa, and the steps of its smallest numbers are 2 ** -9
    bound = torch.maximum(weight.abs() * 2.0**-4, scales * 2.0**-10)
    assert bool((error <= bound * SLACK).all())
    whole = torch.nn.functional.pad(weight.abs(), (0, -columns % 128, 0, -rows % 128))
    largest = whole.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3))
    torch.testing.assert_close(parts.scales * 448, largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_values_of_the_format_stay_the_same(name: str) -> None:
    """int4 only with a scale that divides the largest weight: groups with 7 or -8."""
    torch.manual_seed(0)
    scale = torch.randint(-20, 20, (6, 1)).float().exp2()
    if name == "mxfp4":
        weight = torch.tensor(E2M1)[torch.randint(16, (6, 64))] * scale
    elif name == "int4":
        weight = torch.randint(-7, 8, (6, 64)).float()
        weight[:, ::32] = 7
        weight *= scale
    else:
        weight = torch.randint(127, (6, 64)).byte().view(torch.float8_e4m3fn).float()
        weight[0, 0] = 448
    assert torch.equal(unpacked(weight, name), weight)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("isa", [0, -1])
def test_the_kernel_has_the_bits_of_torch(integers: bool, isa: int) -> None:
    torch.manual_seed(0)
    every = torch.randint(-(2**31), 2**31, (300, 32)).int().view(torch.float32)
    ties = torch.randint(-26, 27, (300, 32)) / 4
    spread = torch.randn(300, 32) * torch.randint(-150, 123, (300, 1)).float().exp2()
    groups = torch.cat(
        (every.nan_to_num(1).clamp(-(2.0**126), 2.0**126), ties, spread, torch.zeros(1, 32))
    )
    kernel = quantize_groups(groups, integers, isa)
    for mine, theirs in zip(kernel, quantize_groups_torch(groups, integers), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def test_parts_do_not_depend_on_their_neighbours() -> None:
    torch.manual_seed(0)
    weight = torch.randn(384, 256)
    for name, scheme in QUANTIZATIONS.items():
        whole, part = unpacked(weight, name), unpacked(weight[128:], name)
        assert torch.equal(whole[128:], part)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_CHUNK", 1 << 12)
            assert torch.equal(unpacked(weight, name), whole)
        parts = quantize(weight, scheme)
        assert parts.codes.nbytes + parts.scales.nbytes <= weight.numel() * (
            scheme.bits / 8 + {"mxfp4": 1 / 32, "int4": 2 / 32, "fp8": 4 / 128**2}[name]
        )


def test_stacks_of_mxfp4_have_blocks() -> None:
    weight = torch.randn(6, 64)
    plain = quantize(weight, QUANTIZATIONS["mxfp4"])
    stack = quantize(weight, Scheme(Kind.MXFP4_STACK, (1, 32)))
    assert stack.codes.shape == (6, 2, 16)
    assert torch.equal(stack.codes.view(6, 32), plain.codes)
    assert torch.equal(stack.scales, plain.scales)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -(2.0**127)])
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_weights_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    weight = torch.zeros(4, 64)
    weight[2, 33] = bad
    with pytest.raises(BadWeight, match="infinite, NaN or beyond"):
        quantize(weight, QUANTIZATIONS[name])
    if name != "fp8":
        with pytest.raises(BadWeight, match="infinite, NaN or beyond"):
            quantize_groups_torch(weight.view(-1, 32), name == "int4")
