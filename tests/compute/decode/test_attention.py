"""Attention compared with naive torch code, in Triton's interpreter and on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from overspill.compute.decode import constants
from tests.compute.decode.near import NAN, assert_near, needs_triton, random, rms_norm
from tests.compute.test_grouped_triton import BF16, FP32, every_device
from tests.pairs import all_pairs

pytestmark = needs_triton
SIZE = 4
"""Slots of a block."""


@pytest.fixture
def attention() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute.decode import attention

    return attention


def blocks_of(positions: list[int], n_blocks: int, device: str, size: int = SIZE) -> Tensor:
    """Blocks of each sequence up to its position, in any order; what follows is never read. A view
    of wider rows, as in the decoding step."""
    order = iter(torch.randperm(n_blocks).tolist())
    counts = [position // size + 1 for position in positions]
    rows = torch.full((len(positions), 2 + max(counts)), 10**9)
    for row, count in zip(rows, counts, strict=True):
        row[2 : 2 + count] = torch.tensor([next(order) for _ in range(count)])
    return rows.to(device)[:, 2:]


def slot_of(blocks: Tensor, sequence: int, position: int, size: int = SIZE) -> int:
    return int(blocks[sequence, position // size]) * size + position % size


@every_device
@pytest.mark.parametrize(
    ("width", "norms", "gated", "dtype"),
    all_pairs([8, 12], [False, True], [False, True], [FP32, BF16]),
)
def test_queries_and_keys_are_rotated_and_stored_in_the_slots_of_their_tokens(
    attention: Any, width: int, norms: bool, gated: bool, dtype: torch.dtype, device: str
) -> None:
    """Models with gates rotate a part of each head."""
    heads, kv_heads, positions = 4, 2, [0, 3, 4, 10]
    turned, shift = (width - 4, 1.0) if gated else (width, 0.0)
    make = {"dtype": dtype, "device": device}
    queries = heads * (2 if gated else 1)
    qkv = random(4, (queries + 2 * kv_heads) * width, **make)
    angles = torch.rand(12, turned // 2)
    tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    weights = (random(width, **make), random(width, **make)) if norms else None
    blocks = blocks_of(positions, 9, device)
    cache = tuple(random(9 * SIZE, kv_heads, width, **make) for _ in range(2))
    keys, values = (each.double() for each in cache)
    where = torch.tensor(positions, device=device), blocks, SIZE
    q = attention.rotate_and_store(qkv, tables, weights, 1e-5, *where, cache, shift, gated)

    def rotated(x: Tensor, norm: int, position: int) -> Tensor:
        if weights is not None:
            x = rms_norm(x, weights[norm].double() + shift, 1e-5)
        (first, second), others = x[:, :turned].chunk(2, -1), x[:, turned:]
        cos, sin = (t[position].double() for t in tables)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, others), -1)

    every = qkv.double().unflatten(1, (-1, width)).split([queries, kv_heads, kv_heads], 1)
    parts = (every[0][:, :: queries // heads], *every[1:])
    expected = []
    for sequence, position in enumerate(positions):
        slot = slot_of(blocks, sequence, position)
        expected.append(rotated(parts[0][sequence], 0, position))
        keys[slot] = rotated(parts[1][sequence], 1, position)
        values[slot] = parts[2][sequence]
    assert q.dtype is dtype
    assert_near(q, torch.stack(expected), dtype)
    assert_near(cache[0], keys, dtype)
    assert torch.equal(cache[1].double(), values)


HEADS: dict[str, tuple[int, int, int | None, bool]] = {
    "groups of 2": (4, 8, None, False),
    "groups of 3 and sinks": (6, 12, None, True),
    "window": (2, 20, 5, False),
    "window over parts and sinks": (4, 8, 70, True),
}
POSITIONS = {
    "one part": ([0, 3, 4, 11], SIZE, 0),
    "several parts": ([63, 64, 140], 16, 0),
    "one program": ([0, 63, 64, 140], 16, 512),
}


@every_device
@pytest.mark.parametrize(
    ("kind", "parts", "dtype"), all_pairs(list(HEADS), list(POSITIONS), [FP32, BF16])
)
def test_a_token_attends_to_those_before_it_in_their_blocks(
    attention: Any,
    kind: str,
    parts: str,
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All other slots are NaN."""
    heads, width, window, sinks = HEADS[kind]
    positions, size, alone = POSITIONS[parts]
    monkeypatch.setattr(constants, "ALONE", alone)
    n_blocks, kv_heads, scale = 24, 2, 0.3
    make = {"dtype": dtype, "device": device}
    blocks = blocks_of(positions, n_blocks, device, size)
    q = random(len(positions), heads, width, **make)
    sink = random(heads, **make) if sinks else None
    keys, values = (torch.full((n_blocks * size, kv_heads, width), NAN, **make) for _ in range(2))
    expected = []
    for sequence, position in enumerate(positions):
        slots = [slot_of(blocks, sequence, at, size) for at in range(position + 1)]
        keys[slots], values[slots] = (random(len(slots), kv_heads, width, **make) for _ in range(2))
        seen = slots if window is None else slots[-window:]
        k, v = (t[seen].double().repeat_interleave(heads // kv_heads, 1) for t in (keys, values))
        scores = torch.einsum("hd,lhd->hl", q[sequence].double(), k) * scale
        if sink is not None:
            scores = torch.cat((scores, sink.double()[:, None]), 1)
        shares = scores.softmax(1)[:, : len(seen)]
        expected.append(torch.einsum("hl,lhd->hd", shares, v).flatten())
    gated = None
    if kind == "groups of 2":
        gated = random(len(positions), (2 * heads + 2 * kv_heads) * width, **make)
        gates = gated.double().unflatten(1, (-1, width))[:, 1 : 2 * heads : 2].sigmoid()
        expected = [*(torch.stack(expected) * gates.flatten(1))]
    where = torch.tensor(positions, device=device), blocks, size
    out = attention.attend(q, (keys, values), *where, scale, window, sink, gated_row=gated)
    assert out.dtype is dtype
    assert_near(out, torch.stack(expected), dtype)


@every_device
@pytest.mark.parametrize("alone", [0, 512])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_new_keys_and_values_are_stored_and_scores_have_a_bias_by_distance(
    attention: Any, alone: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ALONE", alone)
    heads, width, size, positions = 2, 12, 16, [0, 63, 64, 100]
    make = {"dtype": dtype, "device": device}
    blocks = blocks_of(positions, 24, device, size)
    qkv = random(len(positions), 3 * heads * width, **make)
    bias = random(heads, 71, device=device)  # those farther away have the last one
    keys, values = (torch.full((24 * size, heads, width), NAN, **make) for _ in range(2))
    known = {}
    for sequence, position in enumerate(positions):
        slots = [slot_of(blocks, sequence, at, size) for at in range(position)]
        keys[slots], values[slots] = (random(len(slots), heads, width, **make) for _ in range(2))
        known[sequence] = [*slots, slot_of(blocks, sequence, position, size)]
    where = torch.tensor(positions, device=device), blocks, size
    out = attention.attend(qkv, (keys, values), *where, 1.0, bias_hn=bias)
    q, k, v = qkv.unflatten(1, (3, heads, width)).unbind(1)
    expected = []
    for sequence, slots in known.items():
        assert torch.equal(keys[slots[-1]], k[sequence])
        assert torch.equal(values[slots[-1]], v[sequence])
        scores = torch.einsum("hd,lhd->hl", q[sequence].double(), keys[slots].double())
        distance = torch.arange(len(slots), device=device).flip(0).clamp(max=70)
        shares = (scores + bias.double()[:, distance]).softmax(1)
        expected.append(torch.einsum("hl,lhd->hd", shares, values[slots].double()).flatten())
    assert_near(out, torch.stack(expected), dtype)
