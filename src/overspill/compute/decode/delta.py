# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Linear attention of one token of each sequence: a short convolution, the gated delta rule, and a
gated norm. States are changed in place.

A row of projections has queries, keys, values and gates of the output, and two numbers for each
head of values: how much of the state remains, and how much of the value is written. Several heads
of values share a head of queries and keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.decode.launch import after, early, power


class Place(NamedTuple):
    """Columns of a packed row."""

    first: int
    """Column of the first head of keys."""
    step: int
    """Columns from one head of keys to the next."""


class DeltaShape(NamedTuple):
    """Numbers of heads, their widths, and the columns of their parts in a packed row."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    queries: Place
    keys: Place
    values: Place
    gates: Place
    writes: Place
    decays: Place

    @property
    def columns(self) -> int:
        """Number of channels of the convolution."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width


def convolve(
    row_BJ: Tensor, weight_CK: Tensor, states: Tensor, slots_B: Tensor, shape: DeltaShape
) -> Tensor:
    """Return queries, keys and values [B, C] in float32 after a convolution over the last K tokens
    and SiLU; queries are scaled and keys have length 1. `states` are the inputs of the last tokens,
    [slots, C, K]."""
    batch, (columns, taps) = len(row_BJ), weight_CK.shape
    out = torch.empty(batch, columns, dtype=torch.float32, device=row_BJ.device)
    heads = 2 * shape.key_heads + shape.value_heads
    _convolve_kernel[(batch, heads)](
        row_BJ, weight_CK, states, slots_B, out, row_BJ.shape[1], shape.key_width**-0.5, shape,
        columns, taps, power(taps), power(max(shape.key_width, shape.value_width)),
        num_warps=4, **early(row_BJ.device),
    )  # fmt: skip
    return out


@triton.jit
def _convolve_kernel(
    row, weight, states, slots, out, row_width, scale, SHAPE: tl.constexpr, COLUMNS: tl.constexpr,
    TAPS: tl.constexpr, PLACES: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    KEY_HEADS: tl.constexpr = SHAPE.key_heads
    KEY_WIDTH: tl.constexpr = SHAPE.key_width
    GROUP: tl.constexpr = SHAPE.value_heads // SHAPE.key_heads
    batch, head = tl.program_id(0), tl.program_id(1)
    lanes, taps = tl.arange(0, LANES), tl.arange(0, PLACES)
    width = tl.where(head < 2 * KEY_HEADS, KEY_WIDTH, SHAPE.value_width)
    channel = head * KEY_WIDTH
    source = SHAPE.queries.first + head * SHAPE.queries.step
    if head >= 2 * KEY_HEADS:
        own = head - 2 * KEY_HEADS
        channel = 2 * KEY_HEADS * KEY_WIDTH + own * SHAPE.value_width
        source = SHAPE.values.first + own // GROUP * SHAPE.values.step
        source += own % GROUP * SHAPE.value_width
    elif head >= KEY_HEADS:
        source = SHAPE.keys.first + (head - KEY_HEADS) * SHAPE.keys.step
    there = lanes < width
    at = (channel + lanes)[:, None] * TAPS + taps[None, :]
    inside = there[:, None] & (taps < TAPS)[None, :]
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    # a step changes the states of a layer once: no kernel before this one writes them
    own_states = states + tl.load(slots + batch) * COLUMNS * TAPS
    moved = inside & (taps < TAPS - 1)[None, :]
    before = tl.load(own_states + at + 1, mask=moved, other=0.0)
    tl.debug_barrier()  # all are loaded before others are stored in their places
    after(EARLY)
    x = tl.load(row + batch * row_width + source + lanes, mask=there, other=0.0)
    new = tl.where((taps == TAPS - 1)[None, :], x.to(before.dtype)[:, None], before)
    tl.store(own_states + at, new, mask=inside)
    total = tl.sum(new.to(tl.float32) * w, 1)
    total *= tl.sigmoid(total)
    if head < 2 * KEY_HEADS:
        total *= tl.rsqrt(tl.sum(total * total, 0) + 1e-6)
        if head < KEY_HEADS:
            total *= scale
    tl.store(out + batch * COLUMNS + channel + lanes, total, mask=there)


def delta_rule(
    qkv_BC: Tensor,
    row_BJ: Tensor,
    states: Tensor,
    slots_B: Tensor,
    rates: tuple[Tensor, Tensor],
    norm: tuple[Tensor, float],
    shape: DeltaShape,
) -> Tensor:
    """Return the outputs of all heads [B, h * v] after their norm, gated by the packed row. `qkv`
    is the result of `convolve`, `states` [slots, h, k, v] in float32; `rates` are the logarithm and
    the bias of the decay of each head."""
    batch, device = len(row_BJ), row_BJ.device
    heads, width = shape.value_heads, shape.value_width
    out = torch.empty(batch, heads * width, dtype=row_BJ.dtype, device=device)
    _delta_kernel[(batch, heads)](
        qkv_BC, row_BJ, states, slots_B, *rates, norm[0], out, row_BJ.shape[1], norm[1], shape,
        shape.columns, power(shape.key_width), power(width), num_warps=8, **early(device),
    )  # fmt: skip
    return out


@triton.jit
def _delta_kernel(
    qkv, row, states, slots, rates, biases, weight, out, row_width, eps, SHAPE: tl.constexpr,
    COLUMNS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    KEY_WIDTH: tl.constexpr = SHAPE.key_width
    WIDTH: tl.constexpr = SHAPE.value_width
    GROUP: tl.constexpr = SHAPE.value_heads // SHAPE.key_heads
    batch, head = tl.program_id(0), tl.program_id(1)
    key_head, place = head // GROUP, head % GROUP
    keys, lanes = tl.arange(0, KEYS), tl.arange(0, LANES)
    own, there = keys < KEY_WIDTH, lanes < WIDTH
    inside = own[:, None] & there[None, :]
    # a step changes the states of a layer once: no kernel before this one writes them
    at = (tl.load(slots + batch) * SHAPE.value_heads + head) * KEY_WIDTH * WIDTH
    memory = states + at + keys[:, None] * WIDTH + lanes[None, :]
    state = tl.load(memory, mask=inside, other=0.0)
    rate = tl.exp(tl.load(rates + head).to(tl.float32))
    bias = tl.load(biases + head).to(tl.float32)
    w = tl.load(weight + lanes, mask=there, other=0.0).to(tl.float32)
    after(EARLY)
    row += batch * row_width
    qkv += batch * COLUMNS
    decays = row + SHAPE.decays.first + key_head * SHAPE.decays.step
    step = tl.load(decays + place).to(tl.float32) + bias
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))  # softplus
    writes = row + SHAPE.writes.first + key_head * SHAPE.writes.step
    share = tl.sigmoid(tl.load(writes + place).to(tl.float32))
    q = tl.load(qkv + key_head * KEY_WIDTH + keys, mask=own, other=0.0)
    k = tl.load(qkv + (SHAPE.key_heads + key_head) * KEY_WIDTH + keys, mask=own, other=0.0)
    values = qkv + 2 * SHAPE.key_heads * KEY_WIDTH + head * WIDTH
    v = tl.load(values + lanes, mask=there, other=0.0)
    state *= tl.exp(-rate * step)
    known = tl.sum(state * k[:, None], 0)
    state += k[:, None] * ((v - known) * share)[None, :]
    tl.store(memory, state, mask=inside)
    y = tl.sum(state * q[:, None], 0)
    y *= tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)
    gates = row + SHAPE.gates.first + key_head * SHAPE.gates.step + place * WIDTH
    gate = tl.load(gates + lanes, mask=there, other=0.0).to(tl.float32)
    result = w * y * gate * tl.sigmoid(gate)
    to = out + (batch * SHAPE.value_heads + head) * WIDTH
    tl.store(to + lanes, result.to(out.dtype.element_ty), mask=there)
