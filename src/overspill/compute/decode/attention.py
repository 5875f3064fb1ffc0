# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Attention of one token of each sequence, with keys and values in blocks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.decode import constants
from overspill.compute.decode.launch import after, early, power
from overspill.compute.grouped_triton import WIDEN


def rotate_and_store(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    positions_B: Tensor,
    blocks_Bn: Tensor,
    block_size: int,
    cache: tuple[Tensor, Tensor],
    shift: float = 0.0,
    gated: bool = False,
) -> Tensor:
    """Norms and rotates queries and keys of packed rows [B, (h + 2k) d], stores keys and values,
    and returns the queries [B, h, d]. The tables are [positions, r / 2] for the first r numbers of
    a head, which are rotated; norms are [d] each, and `shift` is added to them. If `gated`, each
    head of queries is followed by its gates, which `attend` uses."""
    keys, values = cache
    batch = qkv.shape[0]
    kv_heads, width = keys.shape[1:]
    heads = (qkv.shape[1] // width - 2 * kv_heads) // (1 + gated)
    q_Bhd = torch.empty(batch, heads, width, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = (qkv, qkv) if norms is None else norms
    _rotate_kernel[(batch, heads + 2 * kv_heads)](
        qkv, *tables, q_norm, k_norm, positions_B, blocks_Bn, q_Bhd, keys, values, eps, shift,
        blocks_Bn.stride(0), heads, kv_heads, block_size, width // 2, tables[0].shape[1],
        power(width // 2), norms is not None, gated, num_warps=1, **early(qkv.device),
    )  # fmt: skip
    return q_Bhd


@triton.jit
def _rotate_kernel(
    qkv, cosines, sines, q_norm, k_norm, positions, blocks, q_out, keys, values, eps, shift,
    n_blocks, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr, TURNED: tl.constexpr, LANES: tl.constexpr, NORMS: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, LANES)
    own, turned = lanes < HALF, lanes < TURNED
    # two numbers of a head for each lane: first the pairs that are rotated, then the others
    one = tl.where(turned, lanes, TURNED + lanes)
    two = tl.where(turned, TURNED + lanes, HALF + lanes)
    after(EARLY)
    EACH: tl.constexpr = 2 if GATED else 1
    place = head * EACH
    if head >= HEADS:
        place = head + HEADS * (EACH - 1)
    source = qkv + (batch * (HEADS * EACH + 2 * KV_HEADS) + place) * 2 * HALF
    first = tl.load(source + one, mask=own, other=0.0).to(tl.float32)
    second = tl.load(source + two, mask=own, other=0.0).to(tl.float32)
    position = tl.load(positions + batch)
    block = tl.load(blocks + batch * n_blocks + position // BLOCK_SIZE).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    if head >= HEADS + KV_HEADS:
        to = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * 2 * HALF
        tl.store(to + one, first.to(values.dtype.element_ty), mask=own)
        tl.store(to + two, second.to(values.dtype.element_ty), mask=own)
        return
    if NORMS:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        weight = k_norm
        if head < HEADS:
            weight = q_norm
        first *= scale * (tl.load(weight + one, mask=own, other=0.0).to(tl.float32) + shift)
        second *= scale * (tl.load(weight + two, mask=own, other=0.0).to(tl.float32) + shift)
    cosine = tl.load(cosines + position * TURNED + lanes, mask=turned, other=1.0).to(tl.float32)
    sine = tl.load(sines + position * TURNED + lanes, mask=turned, other=0.0).to(tl.float32)
    to = keys + (slot * KV_HEADS + head - HEADS) * 2 * HALF
    if head < HEADS:
        to = q_out + (batch * HEADS + head) * 2 * HALF
    kind = keys.dtype.element_ty
    tl.store(to + one, (first * cosine - second * sine).to(kind), mask=own)
    tl.store(to + two, (second * cosine + first * sine).to(kind), mask=own)


def attend(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    positions_B: Tensor,
    blocks_Bn: Tensor,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks_h: Tensor | None = None,
    softcap: float | None = None,
    bias_hn: Tensor | None = None,
    gated_row: Tensor | None = None,
) -> Tensor:
    """Return the attention of one token of each sequence to the tokens up to its position, [B, h *
    d]; values may have another width than keys. `bias` is for keys 0, 1, ... tokens before; keys
    farther away have the last bias. It may differ by sequence, [B, h, n]. A long sequence is
    divided over several programs, whose results are combined. Queries are [B, h, d], or packed rows
    [B, (h + 2k) d] with keys and values, which are stored first. Outputs are gated by the sigmoid
    of the gates in `gated_row`, packed rows as in `rotate_and_store`."""
    keys, values = cache
    batch, width = len(q), keys.shape[2]
    kv_heads, out_width = values.shape[1:]
    packed = q.dim() == 2
    heads = q.shape[1] // width - 2 * kv_heads if packed else q.shape[1]
    longest = blocks_Bn.shape[1] * block_size
    part = max(64, power(triton.cdiv(longest, 64)))
    alone = longest <= constants.ALONE and sinks_h is None
    parts = 1 if alone else triton.cdiv(longest, part)
    part = max(16, power(longest)) if alone else part  # 16 is the least of tensor cores
    out = torch.empty(batch, heads * out_width, dtype=q.dtype, device=q.device)
    gates = out if gated_row is None else gated_row
    sums = stats = out
    if not alone:
        sums = torch.empty(batch, heads, parts, out_width, dtype=torch.float32, device=q.device)
        stats = torch.empty(batch, heads, parts, 2, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    reach = 1 if bias_hn is None else bias_hn.shape[-1]
    bias_stride = 0 if bias_hn is None or bias_hn.dim() == 2 else bias_hn.stride(0)
    lanes, out_lanes = (max(16, power(each)) for each in (width, out_width))
    tile = min(64, part, (1 << 15) // (lanes * keys.element_size()))  # as shared memory has room
    _attend_kernel[(batch, kv_heads, parts)](
        q, keys, values, positions_B, blocks_Bn, q if bias_hn is None else bias_hn, gates, sums,
        stats, scale, softcap or 0.0, q.stride(0), blocks_Bn.stride(0), parts, window or 0, reach,
        bias_stride, gates.stride(0), packed, alone, gated_row is not None, bias_hn is not None,
        softcap is not None, group, kv_heads, block_size, width, lanes, out_width, out_lanes, part,
        tile, max(16, power(group)), WIDEN, num_warps=4, **early(q.device),
    )  # fmt: skip
    if alone:
        return out
    _combine_kernel[(batch, heads)](
        sums, stats, out if sinks_h is None else sinks_h, gates, out, positions_B, parts, part,
        gates.stride(0), sinks_h is not None, gated_row is not None, power(parts), out_width,
        power(out_width), num_warps=4, **early(q.device),
    )  # fmt: skip
    return out


@triton.jit
def _attend_kernel(
    q, keys, values, positions, blocks, bias, gates, sums, stats, scale, softcap, q_stride,
    n_blocks, parts, window, reach, bias_stride, row_width, PACKED: tl.constexpr,
    ALONE: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_LANES: tl.constexpr, PART: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    batch, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    after(EARLY)
    position = tl.load(positions + batch)
    begin = part * PART
    if begin > position:
        return
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, LANES)
    own, real = rows < GROUP, lanes[None, :] < WIDTH
    out_lanes = tl.arange(0, OUT_LANES)
    out_real = out_lanes[None, :] < OUT_WIDTH
    q += batch * q_stride
    if PACKED:  # noqa: SIM102, known to the compiler
        if position < begin + PART:
            own_block = tl.load(blocks + batch * n_blocks + position // BLOCK_SIZE).to(tl.int64)
            slot = (own_block * BLOCK_SIZE + position % BLOCK_SIZE) * KV_HEADS + kv_head
            there = slot * WIDTH + lanes
            source = q + (KV_HEADS * GROUP + kv_head) * WIDTH + lanes
            new_key = tl.load(source, mask=lanes < WIDTH, other=0.0)
            new_value = tl.load(source + KV_HEADS * WIDTH, mask=lanes < WIDTH, other=0.0)
            tl.store(keys + there, new_key, mask=lanes < WIDTH)
            tl.store(values + there, new_value, mask=lanes < WIDTH)
            tl.debug_barrier()  # other threads of the program read them
    place = (kv_head * GROUP + rows)[:, None] * WIDTH + lanes[None, :]
    query = tl.load(q + place, mask=own[:, None] & real, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    highest = tl.full((ROWS,), -1e30, tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, OUT_LANES), tl.float32)
    stop = tl.minimum(begin + PART, position + 1)
    for start in range(begin, stop, TILE):
        tokens = start + tl.arange(0, TILE)
        sees = tokens < stop
        if window > 0:
            sees = sees & (tokens > position - window)
        block = tl.load(blocks + batch * n_blocks + tokens // BLOCK_SIZE, mask=sees, other=0)
        slots = block.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        at = (slots * KV_HEADS + kv_head)[:, None] * WIDTH + lanes[None, :]
        key = tl.load(keys + at, mask=sees[:, None] & real, other=0.0)
        at = (slots * KV_HEADS + kv_head)[:, None] * OUT_WIDTH + out_lanes[None, :]
        value = tl.load(values + at, mask=sees[:, None] & out_real, other=0.0)
        if WIDEN:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:  # tanh is not available everywhere
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if BIAS:
            distance = tl.minimum(position - tokens, reach - 1)
            at = batch * bias_stride + (kv_head * GROUP + rows)[:, None] * reach + distance[None, :]
            seen = own[:, None] & sees[None, :]
            scores += tl.load(bias + at, mask=seen, other=0.0).to(tl.float32)
        scores = tl.where(sees[None, :], scores, -1e30)
        new = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.where(sees[None, :], tl.exp(scores - new[:, None]), 0.0)
        shrink = tl.exp(highest - new)
        product = tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        total = total * shrink[:, None] + product
        weight = weight * shrink + tl.sum(shares, 1)
        highest = new
    head = (batch * KV_HEADS + kv_head) * GROUP + rows
    to = head * parts + part
    at = to[:, None] * OUT_WIDTH + out_lanes[None, :]
    if ALONE:
        total /= weight[:, None]
        if GATED:
            own_gates = gates + batch * row_width + (2 * (kv_head * GROUP + rows) + 1) * OUT_WIDTH
            gate = tl.load(
                own_gates[:, None] + out_lanes[None, :], mask=own[:, None] & out_real, other=0.0
            )
            total *= tl.sigmoid(gate.to(tl.float32))
        total = total.to(sums.dtype.element_ty)
    else:
        tl.store(stats + to * 2, highest, mask=own)
        tl.store(stats + to * 2 + 1, weight, mask=own)
    tl.store(sums + at, total, mask=own[:, None] & out_real)


@triton.jit
def _combine_kernel(
    sums, stats, sinks, gates, out, positions, parts, part, row_width, SINKS: tl.constexpr,
    GATED: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0), tl.program_id(1)
    after(EARLY)
    row = batch * tl.num_programs(1) + head
    each, lanes = tl.arange(0, PARTS), tl.arange(0, LANES)
    real = lanes < WIDTH
    done = each * part <= tl.load(positions + batch)
    at = row * parts + each
    highest = tl.load(stats + at * 2, mask=done, other=-1e30)
    weight = tl.load(stats + at * 2 + 1, mask=done, other=0.0)
    most = tl.max(highest, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        most = tl.maximum(most, sink)
    factor = tl.exp(highest - most)
    divisor = tl.sum(weight * factor, 0)
    if SINKS:
        divisor += tl.exp(sink - most)
    total = tl.load(
        sums + at[:, None] * WIDTH + lanes[None, :], mask=done[:, None] & real[None, :], other=0.0
    )
    result = tl.sum(total * factor[:, None], 0) / divisor
    if GATED:
        own = gates + batch * row_width + (2 * head + 1) * WIDTH
        result *= tl.sigmoid(tl.load(own + lanes, mask=real, other=0.0).to(tl.float32))
    tl.store(out + row * WIDTH + lanes, result.to(out.dtype.element_ty), mask=real)
