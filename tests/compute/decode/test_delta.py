"""Linear attention compared with naive torch code, in Triton's interpreter and on a GPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compute.decode.near import NAN, assert_near, needs_triton, random, rms_norm
from tests.compute.test_grouped_triton import FP32, every_device, every_dtype

pytestmark = needs_triton
KEYS, VALUES, WIDTH, OUT, TAPS = 2, 4, 8, 12, 4
"""Heads and their widths, and the tokens that a convolution sees."""


@pytest.fixture
def delta() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute.decode import delta

    return delta


def parts_of(row: Tensor, packed: bool) -> tuple[Any, dict[str, Tensor]]:
    """The shape of packed rows, and their parts by head: with `packed` those of a head of keys are
    together, as in Qwen3-Next, else those of all heads."""
    from overspill.compute.decode.delta import DeltaShape, Place

    group = VALUES // KEYS
    sizes = WIDTH, WIDTH, group * OUT, group * OUT
    places, start = [], 0
    for kinds in (sizes, (group, group)):
        first = start
        for size in kinds:
            places.append(Place(first, sum(kinds) if packed else size))
            first += size if packed else KEYS * size
        start += KEYS * sum(kinds)
    names = "q", "k", "v", "z", "write", "decay"
    found = {}
    for name, place, size in zip(names, places, (*sizes, group, group), strict=True):
        heads = [row[:, place.first + n * place.step :][:, :size] for n in range(KEYS)]
        found[name] = torch.stack(heads, 1).double()
    return DeltaShape(KEYS, VALUES, WIDTH, OUT, *places), found


@every_device
@every_dtype
@pytest.mark.parametrize("packed", [False, True])
def test_states_of_three_sequences_are_changed_where_they_are(
    delta: Any, packed: bool, dtype: torch.dtype, device: str
) -> None:
    """All other slots stay what they are."""
    make = {"dtype": dtype, "device": device}
    channels = 2 * KEYS * WIDTH + VALUES * OUT
    row = random(3, channels + VALUES * OUT + 2 * VALUES, **make)
    shape, parts = parts_of(row, packed)
    slots = torch.tensor([4, 0, 2], device=device)
    inputs = random(6, channels, TAPS, **make)
    weight = random(channels, TAPS, **make)
    new = torch.cat((parts["q"].flatten(1), parts["k"].flatten(1), parts["v"].flatten(1)), 1)
    window = torch.cat((inputs[slots].double()[..., 1:], new[..., None]), 2)
    unused = inputs[[1, 3, 5]].clone()
    qkv = delta.convolve(row, weight, inputs, slots, shape)
    assert torch.equal(inputs[slots].double(), window)
    assert torch.equal(inputs[[1, 3, 5]], unused)

    mixed = F.silu((window * weight.double()).sum(2))
    q, k, v = mixed.split((KEYS * WIDTH, KEYS * WIDTH, VALUES * OUT), 1)
    q, k = (each.unflatten(1, (KEYS, WIDTH)) for each in (q, k))
    q, k = (each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (q, k))
    q = q * WIDTH**-0.5
    assert_near(qkv, torch.cat((q.flatten(1), k.flatten(1), v), 1), FP32)

    q, k = (each.repeat_interleave(VALUES // KEYS, 1) for each in (q, k))
    states = random(6, VALUES, WIDTH, OUT, device=device)
    states[[1, 3, 5]] = NAN
    rates, biases = random(VALUES, device=device), 20 * random(VALUES, **make)
    norm = random(OUT, **make)
    remain = -rates.double().exp() * F.softplus(parts["decay"].flatten(1) + biases.double())
    state = states[slots].double() * remain.exp()[..., None, None]
    known = torch.einsum("bhkv,bhk->bhv", state, k)
    share = parts["write"].flatten(1).sigmoid()[..., None]
    written = (v.unflatten(1, (VALUES, OUT)) - known) * share
    state += k[..., None] * written[:, :, None]
    y = torch.einsum("bhkv,bhk->bhv", state, q)
    y = rms_norm(y, norm, 1e-5) * F.silu(parts["z"].reshape(3, VALUES, OUT))
    out = delta.delta_rule(qkv, row, states, slots, (rates, biases), (norm, 1e-5), shape)
    assert out.dtype is dtype
    assert_near(states[slots], state, FP32, roundings=4)
    assert_near(out, y.flatten(1), dtype, roundings=4)
    assert states[[1, 3, 5]].isnan().all()
