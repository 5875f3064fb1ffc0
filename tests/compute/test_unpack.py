"""Packed experts unpacked by kernels, in Triton's interpreter and on a GPU, compared with naive
decoders bit for bit."""

import pytest
import torch

from overspill.core.experts import ExpertShape
from tests.compute.decode.near import needs_triton
from tests.compute.packed import FORMS, make_experts
from tests.compute.test_grouped_triton import every_device

pytestmark = needs_triton


def check(
    name: str, shape: ExpertShape, device: str, dtype: torch.dtype, split: bool, count: int = 3
) -> None:
    """The second expert has no token rows."""
    from overspill.compute import unpack_triton

    packed = make_experts(name, shape, count, split, extreme=True)
    out = torch.full(packed.plain.shape, -1.0, dtype=dtype, device=device)
    ends = torch.tensor([2, 2, 5][:count], dtype=torch.int32, device=device)
    form = packed.format
    unpack_triton.unpack(form.shape, form.pieces, packed.records.to(device), out, ends)
    alone = torch.empty(packed.plain.shape, dtype=dtype)
    for record, weights in zip(packed.records, alone, strict=True):
        packed.format.unpack(record, weights)
    expected = packed.plain.to(dtype)
    used = [number for number in range(count) if number != 1]
    assert torch.equal(out.cpu()[used], expected[used])
    assert torch.equal(alone, expected)
    matrices = shape.in_numel + shape.out_numel  # biases are copied at once
    assert (out[1:2, :matrices] == -1).all()


@every_device
@pytest.mark.parametrize("name", FORMS)
def test_kernels_unpack_the_values_of_naive_decoders(name: str, device: str) -> None:
    stack = name == "mxfp4-stack"
    columns = {"fp8-block": (20, 24), "fp8-tensor": (21, 9)}.get(name, (160, 32))
    shape = ExpertShape(*columns, gated=True, bias=stack, transposed=stack)
    check(name, shape, device, torch.float32, split=not stack)
    if device == "cuda":  # the interpreter cuts values off where a GPU rounds them
        check(name, shape, device, torch.bfloat16, split=not stack)


@every_device
def test_rows_of_gpt_oss_are_unpacked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from overspill.compute import unpack_triton

    monkeypatch.setattr(unpack_triton, "_TILE", (64, 128))
    shape = ExpertShape(2880, 32, gated=True, bias=True, transposed=True)
    check("mxfp4-stack", shape, device, torch.float32, split=False, count=1)
