# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Experts of each token: a program reads a part of one expert for one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.activation_form import Form
from overspill.compute.decode import constants
from overspill.compute.decode.activate import CLAMPED, activate
from overspill.compute.decode.cpu import MissRequest, request_arguments, send_request
from overspill.compute.decode.expert_groups import experts_of_several
from overspill.compute.decode.launch import after, early, let_next_begin, power, wait
from overspill.compute.decode.low_rank import LowRankRecords, expand, shrink, sum_expanded
from overspill.compute.decode.packed_experts import packed_experts
from overspill.compute.decode.packing import PackedRecords


def experts(
    x_BD: Tensor,
    weights_BK: Tensor,
    offsets_BK: Tensor,
    base: Tensor,
    d_hidden: int,
    activation: Form,
    bias: bool,
    transposed: bool,
    request: MissRequest | None = None,
    packed: PackedRecords | None = None,
    low: LowRankRecords | None = None,
) -> Tensor:
    """Return the weighted sum over the experts of each token that are on the device, [B, D],
    float32. The record of an expert begins at `base` plus its offset, in elements of `base`, which
    are bytes if records are `packed`; `low` are the low-rank parts in records. `request` is sent to
    the CPU first."""
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
    low = low or LowRankRecords(base, None, None)
    if packed is not None and batch < constants.SEVERAL:
        own = int(activation.function), activation.gated, bias
        return packed_experts(x_BD, weights_BK, offsets_BK, d_hidden, own, flags, packed, low)
    low_in = shrink(x_BD, low.memory, low.w_in, offsets_BK, flags)
    if low_in.factors is not None:  # it has sent the request
        flags = request_arguments(None, offsets_BK)
    if batch >= constants.SEVERAL:
        args = x_BD, weights_BK, offsets_BK, base, hidden, sizes, kind, flags, packed, low_in, low
        return experts_of_several(*args)
    rows, block, warps = constants.EXPERT_IN_TILE
    block = min(block, power(width))
    if transposed:  # rows of the result are adjacent in memory
        rows, block = 64, 32
    _expert_in_kernel[(triton.cdiv(d_hidden, rows), batch * top_k)](
        x_BD, base, offsets_BK, hidden, *low_in[:2], *flags.values, *sizes, *kind, low_in.factors,
        rows, block, *flags.constants, num_warps=warps, **early(x_BD.device),
    )  # fmt: skip
    low_out = shrink(hidden, low.memory, low.w_out, offsets_BK, request_arguments(None, offsets_BK))
    out = torch.empty(batch, width, dtype=torch.float32, device=x_BD.device)
    rows, block, warps = constants.EXPERT_OUT_TILE
    block = min(power(d_hidden), block if d_hidden < constants.WIDE else constants.WIDE)
    if transposed:
        rows, block = 32, 32
    _expert_out_kernel[(triton.cdiv(width, rows), batch)](
        hidden, base, offsets_BK, weights_BK, out, *low_out[:2], width, n_in, d_hidden, top_k,
        *kind[2:], low_out.factors, rows, block, num_warps=warps, **early(x_BD.device),
    )  # fmt: skip
    return out


@triton.jit
def _expert_in_kernel(
    x, base, offsets, out, low, shrunk, ready, done, missed, n_rows, width, hidden, n_in, top_k,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr,
    ALIGN: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    REQUEST: tl.constexpr, ON_GPU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    if LOW is None:
        after(EARLY)
    send_request(ready, done, missed, n_rows, REQUEST, ON_GPU)
    offset = tl.load(offsets + pair)
    if offset == -(1 << 62):
        if LOW is not None:
            wait(EARLY)
        return
    record = base + tl.multiple_of(offset, ALIGN)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < hidden
    gate, up = rows, rows + hidden
    if FUNCTION == CLAMPED:
        gate, up = 2 * rows, 2 * rows + 1
    token = x + pair // top_k * width
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
    if LOW is not None:
        wait(EARLY)
        let_next_begin(EARLY)
        own = shrunk + pair * LOW.padded
        g += tl.sum(expand(low, offset, own, gate, there, LOW), 1)
        if GATED:
            u += tl.sum(expand(low, offset, own, up, there, LOW), 1)
    biases = record + n_in * width + width * hidden
    kind = out.dtype.element_ty
    if BIAS:
        g += tl.load(biases + gate, mask=there, other=0.0).to(tl.float32)
        if GATED:
            u += tl.load(biases + up, mask=there, other=0.0).to(tl.float32)
    result = activate(g, u, kind, FUNCTION, GATED)
    tl.store(out + pair * hidden + rows, result, mask=there)


@triton.jit
def _expert_out_kernel(
    a, base, offsets, weights, out, low, shrunk, width, n_in, HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr,
    LOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < width
    batch = tl.program_id(1)
    if LOW is None:
        after(EARLY)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    bias = tl.zeros((ROWS,), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = batch * TOP_K + k
        offset = tl.load(offsets + pair)
        here = offset != -(1 << 62)
        share = tl.load(weights + pair, mask=here, other=0.0)
        record = base + tl.multiple_of(offset, ALIGN) + n_in * width
        for start in range(0, HIDDEN, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = here & (columns < HIDDEN)
            at = rows[:, None] * HIDDEN + columns[None, :]
            if TRANSPOSED:
                at = columns[None, :] * width + rows[:, None]
            w = tl.load(record + at, mask=there[:, None] & inside[None, :], other=0.0)
            value = tl.load(a + pair * HIDDEN + columns, mask=inside, other=0.0)
            total += w.to(tl.float32) * (value.to(tl.float32) * share)[None, :]
        if BIAS:
            own_bias = record + width * HIDDEN + n_in
            b = tl.load(own_bias + rows, mask=there & here, other=0.0)
            bias += b.to(tl.float32) * share
    result = tl.sum(total, 1)
    if BIAS:
        result += bias
    if LOW is not None:
        wait(EARLY)
        let_next_begin(EARLY)
        result += sum_expanded(
            low, offsets, weights, shrunk, batch * TOP_K, rows, there, TOP_K, ROWS, LOW
        )
    tl.store(out + batch * width + rows, result, mask=there)
