# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Experts of several tokens: an expert is read once for all tokens that use it.

Pairs of a token and an expert are divided into groups with the same expert. A program computes a
part of one group, and the first pair of a group stands for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.codes_triton import Planes, exact_scales
from overspill.compute.decode import constants
from overspill.compute.decode.activate import CLAMPED, activate
from overspill.compute.decode.cpu import RequestArguments, request_arguments, send_request
from overspill.compute.decode.launch import after, early, power
from overspill.compute.decode.low_rank import (
    LowRankPart,
    LowRankRecords,
    add_expanded,
    shrink,
)
from overspill.compute.decode.packing import PackedRecords, at_record
from overspill.compute.decode.words import (
    high_of_words,
    lacking_factor,
    weight_of_word,
    words_of_units,
    zeros_of_words,
)
from overspill.compute.grouped_triton import WIDEN

_TOKENS = 16
"""Largest number of pairs of a group: the fewest columns that a product on tensor cores has."""


def experts_of_several(
    x_BD: Tensor,
    weights_BK: Tensor,
    offsets_BK: Tensor,
    base: Tensor,
    hidden: Tensor,
    sizes: tuple[int, int, int, int],
    kind: tuple[int, bool, bool, bool, int],
    flags: RequestArguments,
    packed: PackedRecords | None,
    low_in: LowRankPart,
    low: LowRankRecords,
) -> Tensor:
    """Compute the experts of several tokens. Each is read once: the program of its first token
    computes all of them."""
    (batch, width), (_, d_hidden, _, top_k) = x_BD.shape, sizes
    pairs, device = batch * top_k, x_BD.device
    groups = torch.empty(pairs, 1 + _TOKENS, dtype=torch.int32, device=device)
    _divide_kernel[(pairs,)](
        offsets_BK, groups, *flags.values, pairs, power(pairs), _TOKENS, *flags.constants,
        num_warps=1, **early(device),
    )  # fmt: skip
    packing, w_in, w_out, biases = packed or (None, *(Planes(base, base, base, base),) * 2, base)
    tile = constants.GROUP_TILE
    if packed is not None:  # products in float32 have no tensor cores: large ones compile slowly
        wide = x_BD.dtype == torch.float32
        tile = constants.PACKED_WIDE_TILE if wide else constants.PACKED_GROUP_TILE
    tiles = _TOKENS, tile.rows, tile.block, WIDEN
    _group_in_kernel[(triton.cdiv(d_hidden, tile.rows), pairs)](
        x_BD, base, *w_in, biases, offsets_BK, groups, hidden, *low_in[:2], *sizes, *kind, packing,
        low_in.factors, *tiles, num_warps=tile.warps, **early(device),
    )  # fmt: skip
    none = request_arguments(None, offsets_BK)
    low_out = shrink(hidden, low.memory, low.w_out, offsets_BK, none)
    parts = torch.empty(pairs, width, dtype=torch.float32, device=device)
    _group_out_kernel[(triton.cdiv(width, tile.rows), pairs)](
        hidden, base, *w_out, biases, offsets_BK, groups, parts, *low_out[:2], *sizes, *kind[2:],
        packing, low_out.factors, *tiles, num_warps=tile.warps, **early(device),
    )  # fmt: skip
    out = torch.empty(batch, width, dtype=torch.float32, device=device)
    block = min(1024, power(width))
    _sum_kernel[(triton.cdiv(width, block), batch)](
        parts, weights_BK, offsets_BK, out, width, top_k, block, num_warps=4, **early(device),
    )  # fmt: skip
    return out


@triton.jit
def _divide_kernel(
    offsets, groups, ready, done, missed, n_rows, n_pairs, PAIRS: tl.constexpr,
    TOKENS: tl.constexpr, REQUEST: tl.constexpr, ON_GPU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Writes for each pair the number of pairs of its group if it is the first of them, or 0; and
    the number of the pair to its place in the group."""
    pair = tl.program_id(0)
    after(EARLY)
    send_request(ready, done, missed, n_rows, REQUEST, ON_GPU)
    pairs = tl.arange(0, PAIRS)
    offset = tl.load(offsets + pair)
    same = tl.load(offsets + pairs, mask=pairs < n_pairs, other=-(1 << 62)) == offset
    same = same & (offset != -(1 << 62))
    numbers = tl.cumsum(same.to(tl.int32), 0)  # from 1 on, among pairs with the same expert
    number = tl.sum(tl.where(pairs == pair, numbers, 0), 0) - 1
    begin = number // TOKENS * TOKENS
    first = tl.max(tl.where(same & (numbers == begin + 1), pairs, 0), 0)
    count = tl.minimum(tl.max(numbers, 0) - begin, TOKENS)
    tl.store(groups + pair * (1 + TOKENS), tl.where((first == pair) & (number >= 0), count, 0))
    if number >= 0:
        tl.store(groups + first * (1 + TOKENS) + 1 + number - begin, pair)


@triton.jit
def _group_in_kernel(
    x, base, codes, scales, zeros, factors, biases, offsets, groups, out, low, shrunk, width,
    hidden, n_in, top_k, FUNCTION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr, PACKING: tl.constexpr, LOW: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    after(EARLY)
    count = tl.load(groups + pair * (1 + TOKENS))
    if count == 0:
        return
    offset = tl.load(offsets + pair)
    numbers = tl.arange(0, TOKENS)
    member = numbers < count
    to = tl.load(groups + pair * (1 + TOKENS) + 1 + numbers, mask=member, other=0)
    record = base + tl.multiple_of(offset, ALIGN)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < hidden
    gate, up = rows, rows + hidden
    if FUNCTION == CLAMPED:
        gate, up = 2 * rows, 2 * rows + 1
    tokens = x + to // top_k * width
    g = tl.zeros((ROWS, TOKENS), tl.float32)
    u = tl.zeros((ROWS, TOKENS), tl.float32)
    if PACKING is not None:
        GATE: tl.constexpr = PACKING.gate
        UP: tl.constexpr = PACKING.up_matrix
        own = rows * PACKING.gate_step
        g, u = _packed_products(
            tokens, member, at_record(codes, offset), at_record(scales, offset),
            at_record(zeros, offset), at_record(factors, offset), own, own + PACKING.up, there, g,
            u, GATE, UP, GATED, ROWS, BLOCK, WIDEN,
        )  # fmt: skip
        own_bias = at_record(biases, offset) + PACKING.b_in
    else:
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            value = tl.load(
                tokens[None, :] + columns[:, None],
                mask=member[None, :] & inside[:, None],
                other=0.0,
            )
            mask = there[:, None] & inside[None, :]
            at = gate[:, None] * width + columns[None, :]
            if TRANSPOSED:
                at = columns[None, :] * n_in + gate[:, None]
            w = tl.load(record + at, mask=mask, other=0.0)
            if WIDEN:
                w, value = w.to(tl.float32), value.to(tl.float32)
            g = tl.dot(w, value, g, input_precision="ieee")
            if GATED:
                at = up[:, None] * width + columns[None, :]
                if TRANSPOSED:
                    at = columns[None, :] * n_in + up[:, None]
                w = tl.load(record + at, mask=mask, other=0.0)
                if WIDEN:
                    w = w.to(tl.float32)
                u = tl.dot(w, value, u, input_precision="ieee")
        own_bias = record + n_in * width + width * hidden
    if LOW is not None:
        g = add_expanded(g, low, offset, shrunk, to, member, gate, there, LOW)
        if GATED:
            u = add_expanded(u, low, offset, shrunk, to, member, up, there, LOW)
    if BIAS:
        g += tl.load(own_bias + gate, mask=there, other=0.0).to(tl.float32)[:, None]
        if GATED:
            u += tl.load(own_bias + up, mask=there, other=0.0).to(tl.float32)[:, None]
    result = activate(g, u, out.dtype.element_ty, FUNCTION, GATED)
    at = to[None, :] * hidden + rows[:, None]
    tl.store(out + at, result, mask=member[None, :] & there[:, None])


@triton.jit
def _group_out_kernel(
    a, base, codes, scales, zeros, factors, biases, offsets, groups, parts, low, shrunk, width,
    hidden, n_in, top_k, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr,
    PACKING: tl.constexpr, LOW: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    after(EARLY)
    count = tl.load(groups + pair * (1 + TOKENS))
    if count == 0:
        return
    offset = tl.load(offsets + pair)
    numbers = tl.arange(0, TOKENS)
    member = numbers < count
    to = tl.load(groups + pair * (1 + TOKENS) + 1 + numbers, mask=member, other=0)
    record = base + tl.multiple_of(offset, ALIGN) + n_in * width
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < width
    tokens = a + to * hidden
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    if PACKING is not None:
        OUT: tl.constexpr = PACKING.out
        total, _ = _packed_products(
            tokens, member, at_record(codes, offset), at_record(scales, offset),
            at_record(zeros, offset), at_record(factors, offset), rows, rows, there, total, total,
            OUT, OUT, False, ROWS, BLOCK, WIDEN,
        )  # fmt: skip
        own_bias = at_record(biases, offset) + PACKING.b_out
    else:
        for start in range(0, hidden, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < hidden
            value = tl.load(
                tokens[None, :] + columns[:, None],
                mask=member[None, :] & inside[:, None],
                other=0.0,
            )
            at = rows[:, None] * hidden + columns[None, :]
            if TRANSPOSED:
                at = columns[None, :] * width + rows[:, None]
            w = tl.load(record + at, mask=there[:, None] & inside[None, :], other=0.0)
            if WIDEN:
                w, value = w.to(tl.float32), value.to(tl.float32)
            total = tl.dot(w, value, total, input_precision="ieee")
        own_bias = record + width * hidden + n_in
    if LOW is not None:
        total = add_expanded(total, low, offset, shrunk, to, member, rows, there, LOW)
    if BIAS:
        b = tl.load(own_bias + rows, mask=there, other=0.0)
        total += b.to(tl.float32)[:, None]
    at = to[None, :] * width + rows[:, None]
    tl.store(parts + at, total, mask=member[None, :] & there[:, None])


@triton.jit
def _packed_products(
    tokens, member, codes, scales, zeros, factors, gate, up, there, g, u, GATE: tl.constexpr,
    UP: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the products of rows of packed matrices with several tokens. Weights are rounded to
    the type of the inputs, like unpacked weights."""
    each: tl.constexpr = 32 // GATE.bits
    words: tl.constexpr = GATE.columns // each
    KIND: tl.constexpr = tl.float32 if WIDEN else tokens.dtype.element_ty
    for start in range(0, words, BLOCK):
        columns = start * each + tl.arange(0, BLOCK * each)
        value = tl.load(
            tokens[None, :] + columns[:, None],
            mask=member[None, :] & (columns < GATE.columns)[:, None],
            other=0.0,
        ).to(KIND)
        weight = _weights(
            codes, scales, zeros, factors, gate, there, start, GATE, ROWS, BLOCK * each, KIND
        )
        g = tl.dot(weight, value, g, input_precision="ieee")
        if GATED:
            weight = _weights(
                codes, scales, zeros, factors, up, there, start, UP, ROWS, BLOCK * each, KIND
            )
            u = tl.dot(weight, value, u, input_precision="ieee")
    return g * lacking_factor(GATE), u * lacking_factor(UP)


@triton.jit
def _weights(
    codes, scales, zeros, factors, rows, there, start, MATRIX: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return the weights of some rows, and of int32 from `start` on, in the order of columns and
    without `lacking_factor`."""
    each: tl.constexpr = 32 // MATRIX.bits
    count: tl.constexpr = MATRIX.columns // each
    UNITS: tl.constexpr = COLUMNS // each // MATRIX.unit
    unit = start // MATRIX.unit + tl.arange(0, UNITS)
    word = words_of_units(unit, MATRIX)
    at = MATRIX.codes // 4 + rows[:, None, None] * count + word
    w = tl.load(codes + at, mask=there[:, None, None] & (word < count), other=0)
    mask = there[:, None] & (unit * MATRIX.unit < count)[None, :]
    h = w
    if MATRIX.high_bits > 0:
        at = MATRIX.high // 4 + rows[:, None] * (count // MATRIX.unit) + unit[None, :]
        h = high_of_words(tl.load(codes + at, mask=mask, other=0), MATRIX)
    group = (unit * (MATRIX.unit * each) // MATRIX.group)[None, :]
    z = zeros_of_words(zeros, factors, rows[:, None], group, mask, MATRIX)
    if MATRIX.zeros >= 0:
        z = z[:, :, None]
    s = exact_scales(scales, factors, rows[:, None], group, mask, MATRIX)[:, :, None]
    HALF: tl.constexpr = each // 2
    even = tl.join(
        weight_of_word(w, h, z, s, 0, MATRIX, KIND), weight_of_word(w, h, z, s, HALF, MATRIX, KIND)
    )
    odd = tl.join(
        weight_of_word(w, h, z, s, 1, MATRIX, KIND),
        weight_of_word(w, h, z, s, HALF + 1, MATRIX, KIND),
    )
    if each == 8:
        two = tl.join(
            weight_of_word(w, h, z, s, 2, MATRIX, KIND), weight_of_word(w, h, z, s, 6, MATRIX, KIND)
        )
        three = tl.join(
            weight_of_word(w, h, z, s, 3, MATRIX, KIND), weight_of_word(w, h, z, s, 7, MATRIX, KIND)
        )
        even, odd = tl.join(even, two), tl.join(odd, three)
    return tl.reshape(tl.join(even, odd), (ROWS, COLUMNS))


@triton.jit
def _sum_kernel(
    parts, weights, offsets, out, width, top_k, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    batch = tl.program_id(1)
    after(EARLY)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(top_k):
        pair = batch * top_k + k
        here = inside & (tl.load(offsets + pair) != -(1 << 62))
        part = tl.load(parts + pair * width + columns, mask=here, other=0.0)
        total += tl.load(weights + pair) * part
    tl.store(out + batch * width + columns, total, mask=inside)
