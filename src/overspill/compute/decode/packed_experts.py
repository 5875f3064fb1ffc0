# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Packed experts of a few tokens: a program reads some rows of one expert for one token.

A thread decodes a unit, neighbouring int32 of a row with one scale. The inputs are first stored in
the order of the places of codes in int32, as float32 and multiplied by the factors that codes need:
threads then load them like the codes, 16 bytes at once, and they cost one operation per weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.codes_triton import load_factor
from overspill.compute.decode import constants
from overspill.compute.decode.activate import CLAMPED, activate
from overspill.compute.decode.cpu import RequestArguments, request_arguments, send_request
from overspill.compute.decode.launch import early, let_next_begin, power, wait
from overspill.compute.decode.low_rank import LowRankRecords, expand, shrink, sum_expanded
from overspill.compute.decode.packing import (
    PackedRecords,
    at_record,
    by_places,
    load_units,
    unit_scales,
    unit_zeros,
)
from overspill.compute.decode.words import (
    high_of_words,
    input_factors,
    sum_units,
    term_of_word,
    words_of_units,
    zero_term,
)


def packed_experts(
    x_BD: Tensor,
    weights_BK: Tensor,
    offsets_BK: Tensor,
    d_hidden: int,
    kind: tuple[int, bool, bool],
    flags: RequestArguments,
    packed: PackedRecords,
    low: LowRankRecords,
) -> Tensor:
    """Compute `experts` for packed records. `kind` is the function, and whether experts are gated
    and have biases."""
    (batch, width), top_k, device = x_BD.shape, offsets_BK.shape[1], x_BD.device
    packing, w_in, w_out, biases = packed
    inputs = torch.empty(batch, width, dtype=torch.float32, device=device)
    block = min(1024, power(width))
    _arrange_kernel[(triton.cdiv(width, block), batch)](
        x_BD, inputs, *flags.values, width, packing.gate, block, *flags.constants, num_warps=4,
        **early(device),
    )  # fmt: skip
    none = request_arguments(None, offsets_BK)
    low_in = shrink(x_BD, low.memory, low.w_in, offsets_BK, none)
    hidden = torch.empty(batch * top_k, d_hidden, dtype=torch.float32, device=device)
    tile = constants.PACKED_IN_TILE
    block = min(tile.block, power(width * packing.gate.bits // 32))
    _packed_in_kernel[(triton.cdiv(d_hidden, tile.rows), batch * top_k)](
        inputs, *w_in, biases, offsets_BK, hidden, x_BD, *low_in[:2], top_k, *kind, packing,
        low_in.factors, tile.rows, block, num_warps=tile.warps,
        maxnreg=constants.PACKED_REGISTERS, **early(device),
    )  # fmt: skip
    low_out = shrink(hidden, low.memory, low.w_out, offsets_BK, none, packing.out, scaled=True)
    out = torch.empty(batch, width, dtype=torch.float32, device=device)
    tile = constants.PACKED_OUT_TILE
    block = min(tile.block, power(d_hidden * packing.out.bits // 32))
    _packed_out_kernel[(triton.cdiv(width, tile.rows), batch)](
        hidden, *w_out, biases, offsets_BK, weights_BK, out, *low_out[:2], width, top_k, kind[2],
        packing, low_out.factors, tile.rows, block, num_warps=tile.warps,
        maxnreg=constants.PACKED_REGISTERS, **early(device),
    )  # fmt: skip
    return out


@triton.jit
def _arrange_kernel(
    x, out, ready, done, missed, n_rows, width, MATRIX: tl.constexpr, BLOCK: tl.constexpr,
    REQUEST: tl.constexpr, ON_GPU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Writes inputs in the order of places."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * width
    wait(EARLY)
    let_next_begin(EARLY)
    send_request(ready, done, missed, n_rows, REQUEST, ON_GPU)
    value = tl.load(x + row + columns, mask=columns < width, other=0.0).to(tl.float32)
    value *= input_factors(columns, MATRIX)
    tl.store(out + row + by_places(columns, MATRIX), value, mask=columns < width)


@triton.jit
def _packed_in_kernel(
    inputs, codes, scales, zeros, factors, biases, offsets, out, x, low, shrunk, top_k,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, PACKING: tl.constexpr,
    LOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    GATE: tl.constexpr = PACKING.gate
    UP: tl.constexpr = PACKING.up_matrix
    OUT: tl.constexpr = PACKING.out
    hidden: tl.constexpr = OUT.columns
    pair = tl.program_id(1)
    offset = tl.load(offsets + pair)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (rows < hidden) & (offset != -(1 << 62))
    g, u = _gates_and_up(
        inputs + pair // top_k * GATE.columns, codes, scales, zeros, factors,
        offset, rows * PACKING.gate_step, rows * PACKING.gate_step + PACKING.up, there, GATE, UP,
        GATED, ROWS, BLOCK, EARLY and LOW is None,
    )  # fmt: skip
    gate, up = rows, rows + hidden
    if FUNCTION == CLAMPED:
        gate, up = 2 * rows, 2 * rows + 1
    if LOW is not None:
        wait(EARLY)
        let_next_begin(EARLY)
        own = shrunk + pair * LOW.padded
        g += tl.sum(expand(low, offset, own, gate, there, LOW), 1)
        if GATED:
            u += tl.sum(expand(low, offset, own, up, there, LOW), 1)
    if BIAS:
        own_bias = at_record(biases, offset) + PACKING.b_in
        g += tl.load(own_bias + gate, mask=there, other=0.0).to(tl.float32)
        if GATED:
            u += tl.load(own_bias + up, mask=there, other=0.0).to(tl.float32)
    result = activate(g, u, x.dtype.element_ty, FUNCTION, GATED)
    result = result.to(x.dtype.element_ty).to(tl.float32) * input_factors(rows, OUT)
    tl.store(out + pair * hidden + by_places(rows, OUT), result, mask=there)


@triton.jit
def _gates_and_up(
    inputs, codes, scales, zeros, factors, offset, gate, up, there, GATE: tl.constexpr,
    UP: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Return the products of some rows of gate and up matrices with a token."""
    words: tl.constexpr = GATE.columns * GATE.bits // 32
    UNIT: tl.constexpr = GATE.unit
    UNITS: tl.constexpr = BLOCK // UNIT
    units: tl.constexpr = (words + UNIT - 1) // UNIT
    first = tl.zeros((ROWS, UNITS), tl.float32)
    second = tl.zeros((ROWS, UNITS), tl.float32)
    offsets = offset + tl.zeros((UNITS,), tl.int64)
    unit = tl.arange(0, UNITS)
    w, h, s = load_units(codes, scales, offsets, gate, unit, there, unit < units, GATE)
    w2, h2, s2 = w, h, s
    if GATED:
        w2, h2, s2 = load_units(codes, scales, offsets, up, unit, there, unit < units, UP)
    # codes are on their way while the kernel before ends
    wait(EARLY)
    let_next_begin(EARLY)
    for start in range(0, words, BLOCK):
        next_w, next_h, next_s, next_w2, next_h2, next_s2 = w, h, s, w2, h2, s2
        unit = start // UNIT + tl.arange(0, UNITS)
        inside = unit < units
        if words > BLOCK:
            # first: they are on their way while others are computed
            then = unit + UNITS
            next_w, next_h, next_s = load_units(
                codes, scales, offsets, gate, then, there, then < units, GATE
            )  # fmt: skip
            if GATED:
                next_w2, next_h2, next_s2 = load_units(
                    codes, scales, offsets, up, then, there, then < units, UP
                )
        word = words_of_units(unit, GATE)
        mask = inside[None, :, None] & (word < words)
        g = tl.zeros((ROWS, UNITS, UNIT), tl.float32)
        u = tl.zeros((ROWS, UNITS, UNIT), tl.float32)
        total = tl.zeros((1, UNITS, UNIT), tl.float32)
        h, h2 = high_of_words(h, GATE), high_of_words(h2, UP)
        for _ in range(2):  # halves of int32: code that is half as long
            for place in tl.static_range(16 // GATE.bits):
                value = tl.load(inputs + place * words + word, mask=mask, other=0.0)
                g += term_of_word(w, h, place, GATE) * value
                if GATED:
                    u += term_of_word(w2, h2, place, UP) * value
                total += zero_term(value, place, GATE)
            w, w2, word = w >> 16, w2 >> 16, word + words * (16 // GATE.bits)
            if GATE.high_bits > 0:
                h, h2 = h >> 4 * GATE.high_bits, h2 >> 4 * GATE.high_bits
        z = unit_zeros(zeros, factors, offsets, gate, unit, there, inside, GATE)
        own = unit_scales(s, factors, offsets, gate, unit, there, inside, GATE)
        first += sum_units(g, total, z, own, GATE)
        if GATED:
            z = unit_zeros(zeros, factors, offsets, up, unit, there, inside, UP)
            own = unit_scales(s2, factors, offsets, up, unit, there, inside, UP)
            second += sum_units(u, total, z, own, UP)
        w, h, s, w2, h2, s2 = next_w, next_h, next_s, next_w2, next_h2, next_s2
    factors = at_record(factors, offset)
    here = offset != -(1 << 62)
    g = tl.sum(first, 1) * load_factor(factors, here, GATE)
    return g, tl.sum(second, 1) * load_factor(factors, here, UP)


@triton.jit
def _packed_out_kernel(
    inputs, codes, scales, zeros, factors, biases, offsets, weights, out, low, shrunk, width,
    TOP_K: tl.constexpr, BIAS: tl.constexpr, PACKING: tl.constexpr, LOW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    OUT: tl.constexpr = PACKING.out
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < width
    batch = tl.program_id(1)
    result = _weighted_sum(
        inputs, codes, scales, zeros, factors, offsets, weights, batch * TOP_K, rows, there, TOP_K,
        OUT, ROWS, BLOCK, EARLY and LOW is None,
    )  # fmt: skip
    if BIAS:
        for k in tl.static_range(TOP_K):
            pair = batch * TOP_K + k
            offset = tl.load(offsets + pair)
            here = offset != -(1 << 62)
            share = tl.load(weights + pair, mask=here, other=0.0)
            own_bias = at_record(biases, offset) + PACKING.b_out
            b = tl.load(own_bias + rows, mask=there & here, other=0.0)
            result += b.to(tl.float32) * share
    if LOW is not None:
        wait(EARLY)
        let_next_begin(EARLY)
        result += sum_expanded(
            low, offsets, weights, shrunk, batch * TOP_K, rows, there, TOP_K, ROWS, LOW
        )
    tl.store(out + batch * width + rows, result, mask=there)


@triton.jit
def _weighted_sum(
    inputs, codes, scales, zeros, factors, offsets, weights, first, rows, there,
    TOP_K: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Writes some rows of the weighted sum over the experts of a token. Units are numbered through
    all experts, one after another."""
    words: tl.constexpr = OUT.columns * OUT.bits // 32
    UNIT: tl.constexpr = OUT.unit
    UNITS: tl.constexpr = BLOCK // UNIT
    units: tl.constexpr = (words + UNIT - 1) // UNIT
    result = tl.zeros((ROWS, UNITS), tl.float32)
    at = tl.arange(0, UNITS)
    offset, inside, share = _experts_of(offsets, weights, first, at // units, TOP_K)
    w, h, s = load_units(codes, scales, offset, rows, at % units, there, inside, OUT)
    # codes are on their way while the kernel before ends
    wait(EARLY)
    let_next_begin(EARLY)
    for start in range(0, TOP_K * units, UNITS):
        at = start + tl.arange(0, UNITS)
        after_it = at + UNITS
        next_offset, next_inside, next_share = _experts_of(
            offsets, weights, first, after_it // units, TOP_K
        )  # fmt: skip
        # first: they are on their way while others are computed
        next_w, next_h, next_s = load_units(
            codes, scales, next_offset, rows, after_it % units, there, next_inside, OUT
        )
        k, unit = at // units, at % units
        word = words_of_units(unit, OUT)
        mask = inside[None, :, None] & (word < words)
        own = inputs + ((first + k) * OUT.columns)[None, :, None] + word
        part = tl.zeros((ROWS, UNITS, UNIT), tl.float32)
        total = tl.zeros((1, UNITS, UNIT), tl.float32)
        h = high_of_words(h, OUT)
        for _ in range(2):  # halves of int32: code that is half as long
            for place in tl.static_range(16 // OUT.bits):
                value = tl.load(own + place * words, mask=mask, other=0.0)
                part += term_of_word(w, h, place, OUT) * value
                total += zero_term(value, place, OUT)
            w, own = w >> 16, own + words * (16 // OUT.bits)
            if OUT.high_bits > 0:
                h = h >> 4 * OUT.high_bits
        z = unit_zeros(zeros, factors, offset, rows, unit, there, inside, OUT)
        s = unit_scales(s, factors, offset, rows, unit, there, inside, OUT)
        share *= load_factor(at_record(factors, offset), inside, OUT)
        s *= share[None, :]
        if OUT.n_factors == 2:
            z *= share[None, :]
        result += sum_units(part, total, z, s, OUT)
        w, h, s = next_w, next_h, next_s
        offset, inside, share = next_offset, next_inside, next_share
    return tl.sum(result, 1)


@triton.jit
def _experts_of(offsets, weights, first, k, TOP_K: tl.constexpr):
    """Return the offsets of the experts of some units, whether these are on the device, and their
    shares."""
    offset = tl.load(offsets + first + k, mask=k < TOP_K, other=-(1 << 62))
    inside = offset != -(1 << 62)
    return offset, inside, tl.load(weights + first + k, mask=inside, other=0.0)
