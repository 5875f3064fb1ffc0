"""Low-rank parts of experts of decoding steps compared with naive torch code, in Triton's
interpreter and on a GPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute.activation_form import Form, Function
from overspill.compute.decode import constants
from overspill.compute.decode.constants import ABSENT
from overspill.core.experts import ExpertShape
from overspill.moe.state_dict import split_record
from overspill.tiers.layout import LowRanks, RecordLayout
from tests.compute.activations import activation_oracle
from tests.compute.adapted import ONE_RANK, RANKS, adapted, low_rank_sum
from tests.compute.decode.near import assert_near, needs_triton, random
from tests.compute.decode.test_experts import HOW, LAYOUTS, read
from tests.compute.decode.test_packed_experts import OSS
from tests.compute.packed import make_experts
from tests.compute.test_grouped_triton import BF16, FP32, every_device

pytestmark = needs_triton
IDS: list[list[int | None]] = [[1, 0], [1, None]]
CASES: dict[str, tuple[str | None, ExpertShape, Function, LowRanks]] = {
    "gated": (None, ExpertShape(40, 36, gated=True), Function.SILU, RANKS),
    "w_out alone": (None, ExpertShape(20, 9, gated=False), Function.RELU, ONE_RANK),
    "gpt_oss": (None, LAYOUTS["clamped, with biases and transposed"][1], Function.CLAMPED, RANKS),
    "mxfp4": ("mxfp4", ExpertShape(64, 96, gated=True), Function.SILU, RANKS),
    "fp8": ("fp8-tensor", ExpertShape(28, 20, gated=True), Function.SILU, LowRanks(20, 0)),
    "packed gpt_oss": ("mxfp4-stack", OSS, Function.CLAMPED, RANKS),
}


def expert(
    x: Tensor, plain: Tensor, layout: RecordLayout, stored: Tensor, own: int, form: Form
) -> Tensor:
    shape = layout.shape
    parts = [part.double() for part in split_record(plain[own], shape)]
    w_in, w_out = (part.t() if shape.transposed else part for part in parts[:2])
    b_in, b_out = parts[2:] if shape.bias else (None, None)
    h = F.linear(x.double(), w_in, b_in) + low_rank_sum(layout, stored, own, 0, x)
    a = activation_oracle(h, form)
    return F.linear(a, w_out, b_out) + low_rank_sum(layout, stored, own, 1, a)


@every_device
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_low_rank_parts_are_added(
    case: str, how: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.compute.decode.experts import experts
    from overspill.compute.decode.low_rank import low_rank_records
    from overspill.compute.decode.packing import packed_records

    read(how, monkeypatch)
    for tile in ("PACKED_IN_TILE", "PACKED_OUT_TILE"):
        monkeypatch.setattr(constants, tile, constants.Tile(64, 8, 4))
    name, shape, function, ranks = CASES[case]
    dtype, form = BF16 if case in ("gated", "mxfp4") else FP32, Form(function, shape.gated)
    packed = None if name is None else make_experts(name, shape, 2, split=name != "mxfp4-stack")
    format = None if packed is None else packed.format
    layout = RecordLayout(shape, dtype, format=format, ranks=ranks)
    plain = random(2, shape.numel, dtype=dtype) * 0.5 if packed is None else packed.plain
    stored = adapted(layout, plain if packed is None else packed.records, plain)
    records = stored.to(device)
    base = torch.empty(64, dtype=records.dtype, device=device)
    distance = (records.data_ptr() - base.data_ptr()) // base.element_size()
    offsets = torch.tensor(
        [[ABSENT if i is None else distance + i * records.shape[1] for i in row] for row in IDS],
        device=device,
    )
    x = random(2, shape.d_model, dtype=dtype, device=device)
    weights = torch.rand(offsets.shape, device=device)
    options: Any = shape.d_hidden, form, shape.bias, shape.transposed
    parts = None if format is None else packed_records(format, form, base)
    low = low_rank_records(layout, base)
    out = experts(x, weights, offsets, base, *options, packed=parts, low=low)
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for row, (own, share) in enumerate(zip(IDS, weights.double().tolist(), strict=True)):
        for i, weight in zip(own, share, strict=True):
            if i is not None:
                expected[row] += weight * expert(x[row].cpu(), plain, layout, stored, i, form)
    assert_near(out.cpu(), expected, dtype, roundings=3)
