# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""The experts of each token: a program reads a part of one expert for one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.activation import Form
from overspill.compute.codes_triton import (
    Planes,
    code_of_word,
    input_factor,
    load_factor,
    load_scales,
    sum_factor,
    zeros_of_words,
)
from overspill.compute.decode import constants
from overspill.compute.decode.activate import CLAMPED, activate
from overspill.compute.decode.expert_groups import experts_of_several
from overspill.compute.decode.host import Request, request_arguments, send_request
from overspill.compute.decode.launch import after, early, power
from overspill.compute.decode.low_rank import LowRankRecords, expand, shrink
from overspill.compute.decode.packing import PackedRecords, at_record, by_places


def experts(
    x_BD: Tensor,
    weights_BK: Tensor,
    offsets_BK: Tensor,
    base: Tensor,
    d_hidden: int,
    activation: Form,
    bias: bool,
    transposed: bool,
    request: Request | None = None,
    packed: PackedRecords | None = None,
    low: LowRankRecords | None = None,
) -> Tensor:
    """The weighted sum over the experts of each token that are on the device, [B, D], float32. The
    record of an expert begins at `base` plus its offset, in elements of `base`, which are bytes if
    records are `packed`; `low` are the low-rank parts in records. `request` is sent to the CPU
    first."""
    batch, width = x_BD.shape
    top_k = offsets_BK.shape[1]
    hidden = torch.empty(batch * top_k, d_hidden, dtype=x_BD.dtype, device=x_BD.device)
    n_in = 2 * d_hidden if activation.gated else d_hidden
    numel = n_in * width + width * d_hidden + (n_in + width if bias else 0)
    # of records, in elements
    align = 16 if numel % 16 == 0 or low is not None else 1
    sizes = width, d_hidden, n_in, top_k
    kind = int(activation.function), activation.gated, bias, transposed, align
    flags = request_arguments(request, offsets_BK)
    if packed is None:
        w_in = w_out = Planes(base, base, base, base)
        packing, biases = None, base
    else:
        packing, w_in, w_out, biases = packed
    low = low or LowRankRecords(base, None, None)
    low_in = shrink(x_BD, low.memory, low.w_in, offsets_BK, flags)
    if low_in.factors is not None:
        flags = request_arguments(None, offsets_BK)
    if batch >= constants.SEVERAL:
        args = x_BD, weights_BK, offsets_BK, base, hidden, sizes, kind, flags, packed, low_in, low
        return experts_of_several(*args)
    rows, block, warps = constants.EXPERT_IN_TILE
    block = min(block, power(width))
    if packing is not None:
        rows, block, warps = constants.PACKED_IN_TILE
        block = min(block, power(width * packing.gate.bits // 32))
    elif transposed:  # rows of the result are adjacent in memory
        rows, block = 64, 32
    _expert_in_kernel[(triton.cdiv(d_hidden, rows), batch * top_k)](
        x_BD, base, *w_in, biases, offsets_BK, hidden, *low_in[:2], *flags.values, *sizes, *kind,
        packing, low_in.factors, rows, block, *flags.constants, num_warps=warps,
        **early(x_BD.device),
    )  # fmt: skip
    matrix = None if packing is None else packing.out
    none = request_arguments(None, offsets_BK)
    low_out = shrink(hidden, low.memory, low.w_out, offsets_BK, none, matrix)
    out = torch.empty(batch, width, dtype=torch.float32, device=x_BD.device)
    rows, block, warps = constants.EXPERT_OUT_TILE
    block = min(power(d_hidden), block if d_hidden < constants.WIDE else constants.WIDE)
    if packing is not None:
        rows, block, warps = constants.PACKED_OUT_TILE
        block = min(block, power(d_hidden * packing.out.bits // 32))
    elif transposed:
        rows, block = 32, 32
    _expert_out_kernel[(triton.cdiv(width, rows), batch)](
        hidden, base, *w_out, biases, offsets_BK, weights_BK, out, *low_out[:2], width, n_in,
        d_hidden, top_k, *kind[2:], packing, low_out.factors, rows, block, num_warps=warps,
        **early(x_BD.device),
    )  # fmt: skip
    return out


@triton.jit
def _expert_in_kernel(
    x, base, codes, scales, zeros, factors, biases, offsets, out, low, shrunk, ready, done, missed,
    n_rows, width, hidden, n_in, top_k, FUNCTION: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr, PACKING: tl.constexpr,
    LOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, REQUEST: tl.constexpr,
    ON_GPU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    after(EARLY)
    send_request(ready, done, missed, n_rows, REQUEST, ON_GPU)
    offset = tl.load(offsets + pair)
    if offset == -(1 << 62):
        return
    record = base + tl.multiple_of(offset, ALIGN)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < hidden
    gate, up = rows, rows + hidden
    if FUNCTION == CLAMPED:
        gate, up = 2 * rows, 2 * rows + 1
    token = x + pair // top_k * width
    if LOW is not None:  # first: what it reads is on its way while weights are multiplied
        low_g = expand(low, offset, shrunk + pair * LOW.padded, gate, there, LOW)
        low_u = low_g
        if GATED:
            low_u = expand(low, offset, shrunk + pair * LOW.padded, up, there, LOW)
    if PACKING is not None:
        g, u = _packed_in(
            token, at_record(codes, offset), at_record(scales, offset), at_record(zeros, offset),
            at_record(factors, offset), rows, there, GATED, PACKING, ROWS, BLOCK,
        )  # fmt: skip
        biases = at_record(biases, offset) + PACKING.b_in
    else:
        first = tl.zeros((ROWS, BLOCK), tl.float32)
        second = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < width
            value = tl.load(token + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
            mask = there[:, None] & inside[None, :]
            at = gate[:, None] * width + columns[None, :]
            if TRANSPOSED:
                at = columns[None, :] * n_in + gate[:, None]
            first += tl.load(record + at, mask=mask, other=0.0).to(tl.float32) * value
            if GATED:
                at = up[:, None] * width + columns[None, :]
                if TRANSPOSED:
                    at = columns[None, :] * n_in + up[:, None]
                second += tl.load(record + at, mask=mask, other=0.0).to(tl.float32) * value
        g, u = tl.sum(first, 1), tl.sum(second, 1)
        biases = record + n_in * width + width * hidden
    if LOW is not None:
        g += low_g
        u += low_u
    kind = out.dtype.element_ty
    if BIAS:
        g += tl.load(biases + gate, mask=there, other=0.0).to(tl.float32)
        if GATED:
            u += tl.load(biases + up, mask=there, other=0.0).to(tl.float32)
    result = activate(g, u, kind, FUNCTION, GATED)
    at = rows
    if PACKING is not None:
        OUT: tl.constexpr = PACKING.out
        at = by_places(rows, OUT)
    tl.store(out + pair * hidden + at, result, mask=there)


@triton.jit
def _packed_in(
    token, codes, scales, zeros, factors, rows, there, GATED: tl.constexpr, PACKING: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gates and up values of some hidden columns. Each int32 has several neighbouring codes, and
    every place of it an input of its own."""
    GATE: tl.constexpr = PACKING.gate
    UP: tl.constexpr = PACKING.up_matrix
    each: tl.constexpr = 32 // GATE.bits
    words: tl.constexpr = GATE.columns // each
    gate = (rows * PACKING.gate_step)[:, None]
    up = gate + PACKING.up
    first = tl.zeros((ROWS, BLOCK), tl.float32)
    second = tl.zeros((ROWS, BLOCK), tl.float32)
    w = _load_words(codes, gate, there, 0, GATE, BLOCK)
    w2 = _load_words(codes, up, there, 0, UP, BLOCK) if GATED else w
    for start in range(0, words, BLOCK):
        # first: they are on their way while others are computed
        next_w = _load_words(codes, gate, there, start + BLOCK, GATE, BLOCK)
        next_w2 = _load_words(codes, up, there, start + BLOCK, UP, BLOCK) if GATED else next_w
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        mask = there[:, None] & inside[None, :]
        group = (at * each // GATE.group)[None, :]
        z = zeros_of_words(zeros, gate, group, mask, GATE)
        scale = load_scales(scales, gate, group, mask, GATE) * sum_factor(GATE)
        g = tl.zeros((ROWS, BLOCK), tl.float32)
        if GATED:
            z2 = zeros_of_words(zeros, up, group, mask, UP)
            scale2 = load_scales(scales, up, group, mask, UP) * sum_factor(UP)
            u = tl.zeros((ROWS, BLOCK), tl.float32)
        for place in tl.static_range(each):
            value = tl.load(token + at * each + place, mask=inside, other=0.0).to(tl.float32)
            value = (value * input_factor(place, GATE))[None, :]
            g += code_of_word(w, z, place, GATE) * value
            if GATED:
                u += code_of_word(w2, z2, place, UP) * value
        first += g * scale
        if GATED:
            second += u * scale2
        w, w2 = next_w, next_w2
    g = tl.sum(first, 1) * load_factor(factors, True, GATE)
    return g, tl.sum(second, 1) * load_factor(factors, True, UP)


@triton.jit
def _load_words(codes, row, there, start, MATRIX: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of some columns of a packed matrix."""
    words: tl.constexpr = MATRIX.columns * MATRIX.bits // 32
    at = start + tl.arange(0, BLOCK)
    mask = there[:, None] & (at < words)[None, :]
    return tl.load(codes + MATRIX.codes // 4 + row * words + at[None, :], mask=mask, other=0)


@triton.jit
def _expert_out_kernel(
    a, base, codes, scales, zeros, factors, biases, offsets, weights, out, low, shrunk, width, n_in,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
    ALIGN: tl.constexpr, PACKING: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < width
    batch = tl.program_id(1)
    after(EARLY)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if PACKING is not None:
        OUT: tl.constexpr = PACKING.out
        total = _packed_out(
            a, codes, scales, zeros, factors, offsets, weights, batch * TOP_K, rows, there, TOP_K,
            OUT, ROWS, BLOCK,
        )  # fmt: skip
    more = tl.zeros((ROWS,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = batch * TOP_K + k
        offset = tl.load(offsets + pair)
        here = offset != -(1 << 62)
        share = tl.load(weights + pair, mask=here, other=0.0)
        record = base + tl.multiple_of(offset, ALIGN) + n_in * width
        if PACKING is None:
            own_bias = record + width * HIDDEN + n_in
            for start in range(0, HIDDEN, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                inside = here & (columns < HIDDEN)
                at = rows[:, None] * HIDDEN + columns[None, :]
                if TRANSPOSED:
                    at = columns[None, :] * width + rows[:, None]
                w = tl.load(record + at, mask=there[:, None] & inside[None, :], other=0.0)
                value = tl.load(a + pair * HIDDEN + columns, mask=inside, other=0.0)
                total += w.to(tl.float32) * (value.to(tl.float32) * share)[None, :]
        else:
            own_bias = at_record(biases, offset) + PACKING.b_out
        if BIAS:
            b = tl.load(own_bias + rows, mask=there & here, other=0.0)
            more += b.to(tl.float32) * share
        if LOW is not None:
            own = expand(low, offset, shrunk + pair * LOW.padded, rows, there & here, LOW)
            more += tl.where(here, own, 0.0) * share
    result = tl.sum(total, 1)
    if BIAS or LOW is not None:
        result += more
    tl.store(out + batch * width + rows, result, mask=there)


@triton.jit
def _packed_out(
    a, codes, scales, zeros, factors, offsets, weights, first, rows, there, TOP_K: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows of the weighted sum over the experts of a token, before columns are summed. Columns
    are those of all experts, one after another; inputs are `by_places`."""
    each: tl.constexpr = 32 // OUT.bits
    words: tl.constexpr = OUT.columns // each
    row = rows[:, None]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    w = _words_of(codes, offsets, first, row, there, 0, TOP_K, words, OUT, BLOCK)
    for start in range(0, TOP_K * words, BLOCK):
        # first: it is on its way while this one is computed
        w2 = _words_of(codes, offsets, first, row, there, start + BLOCK, TOP_K, words, OUT, BLOCK)
        at = start + tl.arange(0, BLOCK)
        k, column = at // words, at % words
        offset = tl.load(offsets + first + k, mask=k < TOP_K, other=-(1 << 62))
        here = offset != -(1 << 62)
        share = tl.load(weights + first + k, mask=here, other=0.0)
        share *= load_factor(at_record(factors, offset), here, OUT)
        mask = there[:, None] & here[None, :]
        group = (column * each // OUT.group)[None, :]
        z = zeros_of_words(at_record(zeros, offset)[None, :], row, group, mask, OUT)
        scale = load_scales(at_record(scales, offset)[None, :], row, group, mask, OUT)
        part = tl.zeros((ROWS, BLOCK), tl.float32)
        for place in tl.static_range(each):
            inputs = a + (first + k) * OUT.columns + place * words + column
            value = tl.load(inputs, mask=here, other=0.0).to(tl.float32)
            part += code_of_word(w, z, place, OUT) * (value * input_factor(place, OUT))[None, :]
        total += part * (scale * (share * sum_factor(OUT))[None, :])
        w = w2
    return total


@triton.jit
def _words_of(
    codes, offsets, first, row, there, start, TOP_K: tl.constexpr, WORDS: tl.constexpr,
    OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of some columns of the experts of a token."""
    at = start + tl.arange(0, BLOCK)
    k = at // WORDS
    offset = tl.load(offsets + first + k, mask=k < TOP_K, other=-(1 << 62))
    mask = there[:, None] & (offset != -(1 << 62))[None, :]
    place = OUT.codes // 4 + row * WORDS + (at % WORDS)[None, :]
    return tl.load(at_record(codes, offset)[None, :] + place, mask=mask, other=0)
