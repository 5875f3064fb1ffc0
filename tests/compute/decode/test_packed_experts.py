"""Packed experts of decoding steps compared with naive torch code, in Triton's interpreter and on a
GPU."""

from typing import Any

import pytest
import torch

from overspill.compute.activation_form import Form, Function
from overspill.compute.decode import constants
from overspill.compute.decode.constants import ABSENT
from overspill.core.experts import ExpertShape
from tests.compute.decode.near import assert_near, needs_triton, random
from tests.compute.decode.test_experts import HOW, expert, read
from tests.compute.packed import FORMS, GGUF, make_experts
from tests.compute.test_grouped_triton import BF16, FP32, every_device
from tests.slow import slow_names

pytestmark = needs_triton
SIZES = {"fp8-block": (44, 24), "fp8-tensor": (28, 20), "mxfp8": (64, 32), "int4-channel": (40, 24)}
SLOW = "mxfp4", "nvfp4", "int4", "int4-channel", "awq", "gptq", "fp8-channel", "fp8-tensor", "int8"
"""Others contain what is particular about them."""
OSS = ExpertShape(64, 96, gated=True, bias=True, transposed=True)


def check(
    name: str, shape: ExpertShape, function: Function, dtype: torch.dtype, device: str, split: bool
) -> None:
    from overspill.compute.decode.experts import experts
    from overspill.compute.decode.packing import packed_records, why_not_packed

    form = Form(function, shape.gated)
    packed = make_experts(name, shape, 2, split)
    assert why_not_packed(packed.format, form) is None
    records = packed.records.to(device)
    base = torch.empty(64, dtype=torch.uint8, device=device)
    distance = records.data_ptr() - base.data_ptr()
    ids: list[list[int | None]] = [[1, 0], [1, None]]
    offsets = torch.tensor(
        [[ABSENT if i is None else distance + i * records.shape[1] for i in row] for row in ids],
        device=device,
    )
    x = random(2, shape.d_model, dtype=dtype, device=device)
    weights = torch.rand(offsets.shape, device=device)
    options: Any = shape.d_hidden, form, shape.bias, shape.transposed
    out = experts(
        x, weights, offsets, base, *options, packed=packed_records(packed.format, form, base)
    )
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for row, (own, share) in enumerate(zip(ids, weights.double().tolist(), strict=True)):
        for i, weight in zip(own, share, strict=True):
            if i is not None:
                expected[row] += weight * expert(x[row].cpu(), packed.plain[i], shape, function)
    assert out.dtype is FP32
    assert_near(out.cpu(), expected, dtype, roundings=3)


@every_device
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", slow_names(FORMS, *SLOW))
def test_packed_experts_of_a_token_are_summed(
    name: str, how: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(how, monkeypatch)
    for tile in ("PACKED_IN_TILE", "PACKED_OUT_TILE"):
        monkeypatch.setattr(constants, tile, constants.Tile(64, 8, 4))
    dtype = BF16 if list(FORMS).index(name) % 2 else FP32
    if name == "mxfp4-stack":
        check(name, OSS, Function.CLAMPED, dtype, device, split=False)
    else:
        shape = ExpertShape(*SIZES.get(name, (64, 96)), gated=True)
        check(name, shape, Function.SILU, dtype, device, split=name != "mxfp4")


@every_device
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", GGUF)
def test_types_that_only_gguf_has_are_read_as_codes(
    name: str, how: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(how, monkeypatch)
    for tile in ("PACKED_IN_TILE", "PACKED_OUT_TILE") if device == "cpu" else ():
        monkeypatch.setattr(constants, tile, constants.Tile(128, 32, 4))
    columns = 64 if name == "IQ4_NL" else 256  # of a block at least
    dtype = BF16 if name == "Q5_K" else FP32
    check(name, ExpertShape(columns, 256, True), Function.SILU, dtype, device, name != "IQ4_NL")


@every_device
@pytest.mark.parametrize("how", HOW)
def test_experts_without_gate_can_be_packed(
    how: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(how, monkeypatch)
    check("nvfp4", ExpertShape(32, 48, gated=False), Function.RELU, FP32, device, split=False)


@every_device
@pytest.mark.parametrize(("name", "power"), [("mxfp4", 56), ("mxfp8", 56), ("mxfp8", -48)])
def test_large_and_small_scales_count(
    name: str, power: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.compute.decode.experts import experts
    from overspill.compute.decode.packing import packed_records

    read("once for all tokens", monkeypatch)
    torch.manual_seed(0)
    shape = ExpertShape(64, 32, gated=False)
    packed = make_experts(name, shape, 1, split=False)
    for piece in packed.format.pieces:
        piece.stored["scales"].of(packed.records[0]).add_(power)
    x = random(2, shape.d_model) * 2.0**-power
    expected = torch.stack(
        [expert(row, packed.plain[0].double() * 2.0**power, shape, Function.RELU) for row in x]
    )
    records, form = packed.records.to(device), Form(Function.RELU, False)
    base = torch.empty(64, dtype=torch.uint8, device=device)
    offsets = torch.full((2, 1), records.data_ptr() - base.data_ptr(), device=device)
    x, weights = x.to(device), torch.ones(2, 1, device=device)
    own = packed_records(packed.format, form, base)
    out = experts(x, weights, offsets, base, shape.d_hidden, form, False, False, packed=own)
    assert_near(out.cpu(), expected, FP32, roundings=3)
