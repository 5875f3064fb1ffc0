# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""The experts of several tokens: an expert is read once for all tokens that use it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.decode import constants
from overspill.compute.decode.activate import CLAMPED, activate
from overspill.compute.decode.host import RequestArguments, send_request
from overspill.compute.decode.launch import after, early, power
from overspill.compute.grouped_triton import WIDEN


def experts_of_several(
    x_BD: Tensor,
    weights_BK: Tensor,
    offsets_BK: Tensor,
    base: Tensor,
    hidden: Tensor,
    sizes: tuple[int, int, int, int],
    kind: tuple[int, bool, bool, bool, int],
    flags: RequestArguments,
) -> Tensor:
    """An expert of several tokens is read once: the program of its first token computes all."""
    (batch, width), (_, d_hidden, _, top_k) = x_BD.shape, sizes
    tile, tokens = constants.GROUP_TILE, max(16, power(batch))
    common = batch, tokens, power(top_k), tile.rows, tile.block, WIDEN
    pairs = batch * top_k
    _group_in_kernel[(triton.cdiv(d_hidden, tile.rows), pairs)](
        x_BD, base, offsets_BK, hidden, *flags.values, *sizes, *kind, *common,
        *flags.constants, num_warps=tile.warps, **early(x_BD.device),
    )  # fmt: skip
    parts = torch.empty(pairs, width, dtype=torch.float32, device=x_BD.device)
    _group_out_kernel[(triton.cdiv(width, tile.rows), pairs)](
        hidden, base, offsets_BK, parts, *sizes, *kind[2:], *common, num_warps=tile.warps,
        **early(x_BD.device),
    )  # fmt: skip
    out = torch.empty(batch, width, dtype=torch.float32, device=x_BD.device)
    block = min(1024, power(width))
    _sum_kernel[(triton.cdiv(width, block), batch)](
        parts, weights_BK, offsets_BK, out, width, top_k, power(top_k), block, num_warps=4,
        **early(x_BD.device),
    )  # fmt: skip
    return out


@triton.jit
def _group_in_kernel(
    x, base, offsets, out, ready, done, missed, n_rows, width, hidden, n_in, top_k,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
    ALIGN: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr, KS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDEN: tl.constexpr, REQUEST: tl.constexpr,
    ON_GPU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    after(EARLY)
    send_request(ready, done, missed, n_rows, REQUEST, ON_GPU)
    offset = tl.load(offsets + pair)
    if offset == -(1 << 62):
        return
    first, member, to = _is_first(offset, offsets, top_k, pair, BATCH, TOKENS, KS)
    if not first:
        return
    record = base + tl.multiple_of(offset, ALIGN)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    there = rows < hidden
    gate, up = rows, rows + hidden
    if FUNCTION == CLAMPED:
        gate, up = 2 * rows, 2 * rows + 1
    g = tl.zeros((ROWS, TOKENS), tl.float32)
    u = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        value = tl.load(
            x + tokens[None, :] * width + columns[:, None],
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
    if BIAS:
        biases = record + n_in * width + width * hidden
        g += tl.load(biases + gate, mask=there, other=0.0).to(tl.float32)[:, None]
        if GATED:
            u += tl.load(biases + up, mask=there, other=0.0).to(tl.float32)[:, None]
    result = activate(g, u, out.dtype.element_ty, FUNCTION, GATED)
    at = to[None, :] * hidden + rows[:, None]
    tl.store(out + at, result, mask=member[None, :] & there[:, None])


@triton.jit
def _group_out_kernel(
    a, base, offsets, parts, width, hidden, n_in, top_k, BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr, BATCH: tl.constexpr, TOKENS: tl.constexpr,
    KS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    after(EARLY)
    offset = tl.load(offsets + pair)
    if offset == -(1 << 62):
        return
    first, member, to = _is_first(offset, offsets, top_k, pair, BATCH, TOKENS, KS)
    if not first:
        return
    record = base + tl.multiple_of(offset, ALIGN) + n_in * width
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < width
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, hidden, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < hidden
        value = tl.load(
            a + to[None, :] * hidden + columns[:, None],
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
    if BIAS:
        b = tl.load(record + width * hidden + n_in + rows, mask=there, other=0.0)
        total += b.to(tl.float32)[:, None]
    at = to[None, :] * width + rows[:, None]
    tl.store(parts + at, total, mask=member[None, :] & there[:, None])


@triton.jit
def _is_first(
    offset, offsets, top_k, pair, BATCH: tl.constexpr, TOKENS: tl.constexpr, KS: tl.constexpr
):
    """Whether no earlier pair has this expert; the tokens that have it, and their pairs."""
    tokens, ks = tl.arange(0, TOKENS), tl.arange(0, KS)
    pairs = tokens[:, None] * top_k + ks[None, :]
    inside = (tokens[:, None] < BATCH) & (ks[None, :] < top_k)
    same = tl.load(offsets + pairs, mask=inside, other=-(1 << 62)) == offset
    earlier = tl.sum(tl.sum((same & (pairs < pair)).to(tl.int32), 1), 0)
    return earlier == 0, tl.max(same.to(tl.int32), 1) > 0, tl.max(tl.where(same, pairs, 0), 1)


@triton.jit
def _sum_kernel(
    parts, weights, offsets, out, width, top_k, KS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    batch = tl.program_id(1)
    after(EARLY)
    total = tl.zeros((BLOCK,), tl.float32)
    ks = tl.arange(0, KS)
    own = tl.load(offsets + batch * top_k + ks, mask=ks < top_k, other=-(1 << 62))
    for k in range(top_k):
        pair = batch * top_k + k
        offset = tl.load(offsets + pair)
        # a token may have an expert twice: it was computed once
        computed = batch * top_k + tl.max(tl.where(own == offset, ks, 0), 0)
        here = inside & (offset != -(1 << 62))
        part = tl.load(parts + computed * width + columns, mask=here, other=0.0)
        total += tl.load(weights + pair) * part
    tl.store(out + batch * width + columns, total, mask=inside)
