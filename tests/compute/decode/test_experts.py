"""Experts compared with naive torch code, in Triton's interpreter and on a GPU."""

import dataclasses
import itertools
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
from tests.compute.activations import activation_oracle
from tests.compute.decode.near import assert_near, needs_triton, random
from tests.compute.test_grouped_triton import BF16, FP32, every_device

pytestmark = needs_triton


@pytest.fixture
def experts() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute.decode.experts import experts

    return experts


def read(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set how often an expert is read: once for each token, or once for all."""
    monkeypatch.setattr(constants, "SEVERAL", 1 if how == "once for all tokens" else 100)


HOW = ["for each token", "once for all tokens"]
LAYOUTS = {
    "silu": (Function.SILU, ExpertShape(20, 9, gated=True)),
    "silu, aligned": (Function.SILU, ExpertShape(16, 8, gated=True)),
    "gelu": (Function.GELU, ExpertShape(20, 9, gated=False)),
    "squared relu": (Function.RELU2, ExpertShape(20, 9, gated=False)),
    "relu, with biases": (Function.RELU, ExpertShape(20, 9, gated=False, bias=True)),
    "gated relu": (Function.RELU, ExpertShape(20, 9, gated=True)),
    "limited": (Function.LIMITED, ExpertShape(20, 9, gated=True)),
    "clamped, with biases and transposed": (
        Function.CLAMPED,
        ExpertShape(20, 9, gated=True, bias=True, transposed=True),
    ),
}


def expert(x: Tensor, record: Tensor, shape: ExpertShape, function: Function) -> Tensor:
    parts = [part.double() for part in split_record(record, shape)]
    w_in, w_out = (part.t() if shape.transposed else part for part in parts[:2])
    b_in, b_out = parts[2:] if shape.bias else (None, None)
    h = F.linear(x.double(), w_in, b_in)
    return F.linear(activation_oracle(h, Form(function, shape.gated)), w_out, b_out)


CHOSEN: dict[str, list[list[int | None]]] = {
    "three experts": [[1, 4, 0]],
    "several rows": [[0, 3], [3, 3]],
    "some absent": [[1, None], [None, None]],
    "all absent": [[None]],
}


# every kernel with every layout, and both dtypes with each of them
ROWS = [
    *itertools.product(LAYOUTS, ["some absent"], HOW),
    *itertools.product(["silu"], ["several rows", "three experts", "all absent"], HOW),
]
DTYPES = itertools.cycle([FP32, BF16, BF16, FP32, FP32])


@every_device
@pytest.mark.parametrize(
    ("layout", "chosen", "how", "dtype"),
    [(*row, next(DTYPES)) for row in ROWS],
)
def test_the_experts_of_a_token_that_are_on_the_device_are_summed(
    experts: Any,
    layout: str,
    chosen: str,
    how: str,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read(how, monkeypatch)
    ids = CHOSEN[chosen]
    function, shape = LAYOUTS[layout]
    records = random(5, shape.numel, dtype=dtype, device=device) * 0.5
    base = torch.empty(8, dtype=dtype, device=device)
    distance = (records.data_ptr() - base.data_ptr()) // base.element_size()
    offsets = torch.tensor(
        [[ABSENT if i is None else distance + i * shape.numel for i in row] for row in ids],
        device=device,
    )
    x = random(len(ids), shape.d_model, dtype=dtype, device=device)
    x = 5 * x if function is Function.LIMITED else x
    weights = torch.rand(offsets.shape, device=device)
    options = shape.d_hidden, Form(function, shape.gated), shape.bias, shape.transposed
    out = experts(x, weights, offsets, base, *options)
    expected = torch.zeros(x.shape, dtype=torch.float64, device=device)
    for row, (own, share) in enumerate(zip(ids, weights.double(), strict=True)):
        for i, weight in zip(own, share, strict=True):
            if i is not None:
                expected[row] += weight * expert(x[row], records[i], shape, function)
    assert out.dtype is FP32
    assert_near(out, expected, dtype, roundings=3)  # gate, up and their product


@every_device
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_can_be_larger_than_a_tile(
    experts: Any, layout: str, how: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(how, monkeypatch)
    monkeypatch.setattr(constants, "EXPERT_IN_TILE", constants.Tile(8, 16, 4))
    monkeypatch.setattr(constants, "EXPERT_OUT_TILE", constants.Tile(16, 8, 4))
    monkeypatch.setattr(constants, "GROUP_TILE", constants.Tile(16, 16, 4))
    function, small = LAYOUTS[layout]
    shape = dataclasses.replace(small, d_model=40, d_hidden=36)
    record = random(shape.numel, device=device) * 0.5
    x = random(1, shape.d_model, device=device)
    one, zero = torch.ones(1, 1, device=device), torch.zeros(1, 1, dtype=torch.int64)
    options = shape.d_hidden, Form(function, shape.gated), shape.bias, shape.transposed
    out = experts(x, one, zero.to(device), record, *options)
    assert_near(out, expert(x, record, shape, function), FP32)
