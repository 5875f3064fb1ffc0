# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Kernels of a decoding step: one new token of each sequence. A kernel reads weights once and does
as much as it can with them, because launches and gaps take longer than arithmetic.

Sums are float32. Nothing here waits for the host, so a whole step can be one CUDA graph.

Shapes: B sequences, D model, H hidden, E experts, K top-k, h heads, k heads of keys and values, d
width of a head. Keys and values are [slots, k, d]; the slot of a token is found in `blocks` [B, n],
the blocks of each sequence.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from overspill.compute.grouped_triton import WIDEN
from overspill.compute.misses import MissBuffers

ABSENT = -(1 << 62)
"""In a table of experts: not on the device."""
SILU, GELU, CLAMPED = 0, 1, 2
"""Activations: SiLU(gate) * up, GELU, and that of GPT-OSS with interleaved gates."""


class Tile(NamedTuple):
    """The weights that a program reads at once, and its warps."""

    rows: int
    block: int
    warps: int


LARGE = 1 << 15
"""Rows of a matrix from which programs read in larger pieces."""
LARGE_TILE, SMALL_TILE = Tile(8, 512, 4), Tile(2, 2048, 4)
EXPERT_IN_TILE, EXPERT_OUT_TILE = Tile(2, 2048, 4), Tile(1, 256, 4)
GROUP_TILE = Tile(64, 64, 4)
"""Fastest on an H200."""
_WIDE = 2048
"""Hidden width from which a program reads so much of an expert at once."""
SEVERAL = 8
"""Tokens from which on an expert is read once for all that use it."""


def _power(n: int) -> int:
    return int(triton.next_power_of_2(n))


@cache
def _early(device: torch.device) -> dict[str, Any]:
    """Options of a launch that does not wait for the kernel before it."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@triton.jit
def _after(EARLY: tl.constexpr):
    """What kernels before this one have written may be read from here on: before it, only what no
    kernel writes. The next kernel may begin: it waits here for this one."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


# -- the CPU --------------------------------------------------------------------------------------


class HostRows(NamedTuple):
    """What the CPU adds to some rows: float32 in pinned memory, where `missed_B` is not 0, once
    `done` is 1."""

    out_BD: Tensor
    missed_B: Tensor
    done: Tensor


class Request(NamedTuple):
    """Tells the CPU that a list of misses is complete, if there are any: `done` becomes 0, then
    `ready` 1."""

    ready: Tensor
    done: Tensor
    missed_B: Tensor


@triton.jit
def _fence(ON_GPU: tl.constexpr):
    """Orders reads and writes of memory that the CPU uses too."""
    if ON_GPU:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _request(ready, done, missed, n_rows, REQUEST: tl.constexpr, ON_GPU: tl.constexpr):
    """One program of a kernel raises the flag, after the kernel that has written the list."""
    if REQUEST > 0:  # noqa: SIM102, known to the compiler
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            rows = tl.arange(0, REQUEST)
            if tl.sum(tl.load(missed + rows, mask=rows < n_rows, other=0), 0) > 0:
                tl.store(done, 0)
                _fence(ON_GPU)
                tl.store(ready, 1)


@triton.jit
def _await(done, count, ON_GPU: tl.constexpr):
    """Until the CPU has computed `count` misses of this row, if there are any."""
    if count > 0:
        seen = tl.load(done, volatile=True)
        while seen == 0:
            if ON_GPU:
                tl.inline_asm_elementwise(
                    "nanosleep.u32 64; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
                )
            seen = tl.load(done, volatile=True)
        _fence(ON_GPU)


def add_host_rows(y_BD: Tensor, host: HostRows) -> None:
    """Adds what the CPU has computed to float32 rows, in place."""
    n_rows, width = y_BD.shape
    _add_rows_kernel[(n_rows,)](
        y_BD, *host, width, _power(width), y_BD.is_cuda, num_warps=4, **_early(y_BD.device)
    )


@triton.jit
def _add_rows_kernel(
    y, host, missed, done, width, BLOCK: tl.constexpr, ON_GPU: tl.constexpr, EARLY: tl.constexpr
):
    _after(EARLY)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    count = tl.load(missed + row)
    _await(done, count, ON_GPU)
    at = row * width + columns
    own = (columns < width) & (count > 0)
    total = tl.load(y + at, mask=own, other=0.0)
    total += tl.load(host + at, mask=own, other=0.0, cache_modifier=".cv")
    tl.store(y + at, total, mask=own)


# -- norms ----------------------------------------------------------------------------------------


def add_norm(
    residual_BD: Tensor,
    parts: list[Tensor],
    weight_D: Tensor,
    eps: float,
    host: HostRows | None = None,
) -> Tensor:
    """Adds up to two parts [B, D] and the rows of the CPU to the residual, in place; returns its
    RMS norm."""
    n_rows, width = residual_BD.shape
    out = torch.empty_like(residual_BD)
    a, b = (*parts, *([residual_BD] * (2 - len(parts))))
    rows = (residual_BD,) * 3 if host is None else host
    _add_norm_kernel[(n_rows,)](
        residual_BD, a, b, *rows, weight_D, out, width, eps, len(parts), host is not None,
        out.is_cuda, _power(width), num_warps=8, **_early(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _add_norm_kernel(
    residual, a, b, host, missed, done, weight, out, width, eps, N_PARTS: tl.constexpr,
    HOST: tl.constexpr, ON_GPU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    _after(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = row * width + columns
    x = tl.load(residual + at, mask=inside, other=0.0)
    if N_PARTS > 0:
        total = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
        if N_PARTS > 1:
            total += tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
        if HOST:
            count = tl.load(missed + row)
            _await(done, count, ON_GPU)
            own = inside & (count > 0)
            total += tl.load(host + at, mask=own, other=0.0, cache_modifier=".cv")
        x = (x.to(tl.float32) + total).to(residual.dtype.element_ty)
        tl.store(residual + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(out + at, (w * (wide * scale)).to(out.dtype.element_ty), mask=inside)


# -- dense products -------------------------------------------------------------------------------


def linear(
    x_BK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x @ w^T + bias, for very few rows."""
    n_rows, width = x_BK.shape
    n = w_NK.shape[0]
    out = torch.empty(n_rows, n, dtype=dtype or x_BK.dtype, device=x_BK.device)
    tile = LARGE_TILE if n * n_rows >= LARGE else SMALL_TILE
    block = min(tile.block, _power(width))
    _linear_kernel[(triton.cdiv(n, tile.rows), n_rows)](
        x_BK, w_NK, x_BK if bias_N is None else bias_N, out, n, width,
        bias_N is not None, tile.rows, block, num_warps=tile.warps, **_early(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _linear_kernel(
    x, w, bias, out, n, width, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(1)
    there = rows < n
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    columns = tl.arange(0, BLOCK)
    first = w + rows.to(tl.int64)[:, None] * width + columns[None, :]
    weights = tl.load(first, mask=there[:, None] & (columns < width)[None, :], other=0.0)
    _after(EARLY)
    for start in range(0, width, BLOCK):
        value = tl.load(
            x + batch * width + start + columns, mask=columns < width - start, other=0.0
        )
        total += weights.to(tl.float32) * value.to(tl.float32)[None, :]
        inside = columns < width - start - BLOCK
        weights = tl.load(first + start + BLOCK, mask=there[:, None] & inside[None, :], other=0.0)
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)
    tl.store(out + batch * n + rows, result.to(out.dtype.element_ty), mask=there)


# -- attention ------------------------------------------------------------------------------------


def rotate_and_store(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    positions_B: Tensor,
    blocks_Bn: Tensor,
    block_size: int,
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    """Norms and rotates queries and keys of packed rows [B, (h + 2k) d], stores keys and values,
    and returns the queries [B, h, d]. The tables are [positions, d / 2], norms [d] each."""
    keys, values = cache
    batch = qkv.shape[0]
    kv_heads, width = keys.shape[1:]
    heads = qkv.shape[1] // width - 2 * kv_heads
    q_Bhd = torch.empty(batch, heads, width, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = (qkv, qkv) if norms is None else norms
    _rotate_kernel[(batch, heads + 2 * kv_heads)](
        qkv, *tables, q_norm, k_norm, positions_B, blocks_Bn, q_Bhd, keys, values, eps,
        blocks_Bn.stride(0), heads, kv_heads, block_size, width // 2, _power(width // 2),
        norms is not None, num_warps=1, **_early(qkv.device),
    )  # fmt: skip
    return q_Bhd


@triton.jit
def _rotate_kernel(
    qkv, cosines, sines, q_norm, k_norm, positions, blocks, q_out, keys, values, eps, n_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr,
    LANES: tl.constexpr, NORMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, LANES)
    own = lanes < HALF
    _after(EARLY)
    source = qkv + (batch * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    first = tl.load(source + lanes, mask=own, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + lanes, mask=own, other=0.0).to(tl.float32)
    position = tl.load(positions + batch)
    block = tl.load(blocks + batch * n_blocks + position // BLOCK_SIZE).to(tl.int64)
    slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    if head >= HEADS + KV_HEADS:
        to = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * 2 * HALF
        tl.store(to + lanes, first.to(values.dtype.element_ty), mask=own)
        tl.store(to + HALF + lanes, second.to(values.dtype.element_ty), mask=own)
        return
    if NORMS:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        weight = k_norm
        if head < HEADS:
            weight = q_norm
        first *= scale * tl.load(weight + lanes, mask=own, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + HALF + lanes, mask=own, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + position * HALF + lanes, mask=own, other=0.0).to(tl.float32)
    sine = tl.load(sines + position * HALF + lanes, mask=own, other=0.0).to(tl.float32)
    to = keys + (slot * KV_HEADS + head - HEADS) * 2 * HALF
    if head < HEADS:
        to = q_out + (batch * HEADS + head) * 2 * HALF
    kind = keys.dtype.element_ty
    tl.store(to + lanes, (first * cosine - second * sine).to(kind), mask=own)
    tl.store(to + HALF + lanes, (second * cosine + first * sine).to(kind), mask=own)


def attend(
    q_Bhd: Tensor,
    cache: tuple[Tensor, Tensor],
    positions_B: Tensor,
    blocks_Bn: Tensor,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks_h: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one token of each sequence to those up to its position, [B, h * d]; values may
    have another width than keys. A sequence
    is divided over several programs; what each has found is combined."""
    keys, values = cache
    batch, heads, width = q_Bhd.shape
    kv_heads, out_width = values.shape[1:]
    longest = blocks_Bn.shape[1] * block_size
    part = max(64, _power(triton.cdiv(longest, 64)))
    parts = triton.cdiv(longest, part)
    sums = torch.empty(batch, heads, parts, out_width, dtype=torch.float32, device=q_Bhd.device)
    stats = torch.empty(batch, heads, parts, 2, dtype=torch.float32, device=q_Bhd.device)
    group = heads // kv_heads
    _attend_kernel[(batch, kv_heads, parts)](
        q_Bhd, keys, values, positions_B, blocks_Bn, sums, stats, scale, softcap or 0.0,
        blocks_Bn.stride(0), parts, window or 0, softcap is not None, group, kv_heads, block_size,
        width, max(16, _power(width)), out_width, max(16, _power(out_width)), part,
        min(64, part), max(16, _power(group)), WIDEN, num_warps=4, **_early(q_Bhd.device),
    )  # fmt: skip
    out = torch.empty(batch, heads * out_width, dtype=q_Bhd.dtype, device=q_Bhd.device)
    _combine_kernel[(batch, heads)](
        sums, stats, out if sinks_h is None else sinks_h, out, positions_B, parts, part,
        sinks_h is not None, _power(parts), out_width, _power(out_width), num_warps=4,
        **_early(q_Bhd.device),
    )  # fmt: skip
    return out


@triton.jit
def _attend_kernel(
    q, keys, values, positions, blocks, sums, stats, scale, softcap, n_blocks, parts, window,
    SOFTCAP: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, OUT_WIDTH: tl.constexpr, OUT_LANES: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    batch, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _after(EARLY)
    position = tl.load(positions + batch)
    begin = part * PART
    if begin > position:
        return
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, LANES)
    own, real = rows < GROUP, lanes[None, :] < WIDTH
    out_lanes = tl.arange(0, OUT_LANES)
    out_real = out_lanes[None, :] < OUT_WIDTH
    head = (batch * KV_HEADS + kv_head) * GROUP + rows
    query = tl.load(q + head[:, None] * WIDTH + lanes[None, :], mask=own[:, None] & real, other=0.0)
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
        scores = tl.where(sees[None, :], scores, -1e30)
        new = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.where(sees[None, :], tl.exp(scores - new[:, None]), 0.0)
        shrink = tl.exp(highest - new)
        product = tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        total = total * shrink[:, None] + product
        weight = weight * shrink + tl.sum(shares, 1)
        highest = new
    to = head * parts + part
    at = to[:, None] * OUT_WIDTH + out_lanes[None, :]
    tl.store(sums + at, total, mask=own[:, None] & out_real)
    tl.store(stats + to * 2, highest, mask=own)
    tl.store(stats + to * 2 + 1, weight, mask=own)


@triton.jit
def _combine_kernel(
    sums, stats, sinks, out, positions, parts, part, SINKS: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0), tl.program_id(1)
    _after(EARLY)
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
    tl.store(out + row * WIDTH + lanes, result.to(out.dtype.element_ty), mask=real)


# -- experts --------------------------------------------------------------------------------------


class Routed(NamedTuple):
    """The experts of each token, [B, K]."""

    weights: Tensor
    offsets: Tensor  # where they are
    missed_B: Tensor | None  # how many of each token are not on the device


def route(
    logits_BE: Tensor,
    top_k: int,
    softmax_first: bool,
    normalize: bool,
    table_E: Tensor,
    real_B: Tensor,
    x_BD: Tensor,
    ids_BK: Tensor,
    misses: MissBuffers | None = None,
    given: bool = False,
) -> Routed:
    """Chooses experts, writes their ids to `ids_BK` and looks up where they are. With `given` the
    ids are there already, and only the weights are those of the chosen ones. With `misses`,
    those that are not on the device are written there with their token rows: -1 stands for an
    expert that is on the device. Rows that are not real have no experts."""
    n_experts, width = logits_BE.shape[1], x_BD.shape[1]
    weights = torch.empty(len(x_BD), top_k, dtype=torch.float32, device=x_BD.device)
    offsets, missed, to = _found(weights, ids_BK, misses)
    _route_kernel[(len(x_BD),)](
        logits_BE, table_E, real_B, x_BD, ids_BK, weights, offsets, *to, n_experts, width, top_k,
        _power(top_k), _power(n_experts), _power(width), softmax_first, normalize,
        misses is not None, given, num_warps=1, **_early(x_BD.device),
    )  # fmt: skip
    return Routed(weights, offsets, missed)


def look_up(
    ids_BK: Tensor,
    weights_BK: Tensor,
    table_E: Tensor,
    real_B: Tensor,
    x_BD: Tensor,
    misses: MissBuffers | None = None,
) -> Routed:
    """As `route`, for experts that are chosen already."""
    offsets, missed, to = _found(weights_BK, ids_BK, misses)
    top_k, width = ids_BK.shape[1], x_BD.shape[1]
    _look_up_kernel[(len(x_BD),)](
        ids_BK, weights_BK, table_E, real_B, x_BD, offsets, *to, width, top_k, _power(top_k),
        _power(width), misses is not None, num_warps=1, **_early(x_BD.device),
    )  # fmt: skip
    return Routed(weights_BK, offsets, missed)


def _found(
    weights_BK: Tensor, ids_BK: Tensor, misses: MissBuffers | None
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Memory for offsets, for the number of misses of each token, and for lists of misses."""
    offsets = torch.empty_like(weights_BK, dtype=torch.int64)
    if misses is None:
        return offsets, None, (ids_BK,) * 6
    missed = torch.empty_like(ids_BK[:, 0])
    to = misses.experts_P, misses.weights_P, misses.x_RD, misses.count, misses.n_rows
    return offsets, missed, (missed, *to)


@triton.jit
def _route_kernel(
    logits, table, is_real, x, ids, weights, offsets, missed, host_experts, host_weights, host_x,
    host_count, host_rows, n_experts, width, TOP_K: tl.constexpr, KS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, SOFTMAX_FIRST: tl.constexpr, NORMALIZE: tl.constexpr,
    MISSES: tl.constexpr, GIVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    _after(EARLY)
    experts, ks = tl.arange(0, BLOCK), tl.arange(0, KS)
    inside = experts < n_experts
    score = tl.load(logits + batch * n_experts + experts, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    if SOFTMAX_FIRST:
        score = tl.exp(score - tl.max(score, 0))
        score = tl.where(inside, score / tl.sum(score, 0), float("-inf"))
    chosen = tl.zeros((KS,), tl.int32)
    value = tl.full((KS,), float("-inf"), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(score, 0)
        found = tl.min(tl.where(score == best, experts, BLOCK), 0)
        found = tl.minimum(found, n_experts - 1)  # all are NaN
        chosen = tl.where(ks == k, found, chosen)
        value = tl.where(ks == k, best, value)
        score = tl.where(experts == found, float("-inf"), score)
    real = ks < TOP_K
    if not SOFTMAX_FIRST:
        value = tl.exp(value - tl.max(value, 0))
    if NORMALIZE or not SOFTMAX_FIRST:
        value = value / tl.sum(tl.where(real, value, 0.0), 0)
    to = batch * TOP_K + ks
    if GIVEN:
        chosen = tl.load(ids + to, mask=real, other=0)
    else:
        tl.store(ids + to, chosen, mask=real)
    tl.store(weights + to, value, mask=real)
    _find(
        chosen, value, ks, table, is_real, x, offsets, missed, host_experts, host_weights, host_x,
        host_count, host_rows, width, TOP_K, WIDTH, MISSES,
    )  # fmt: skip


@triton.jit
def _look_up_kernel(
    ids, weights, table, is_real, x, offsets, missed, host_experts, host_weights, host_x,
    host_count, host_rows, width, TOP_K: tl.constexpr, KS: tl.constexpr, WIDTH: tl.constexpr,
    MISSES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ks = tl.arange(0, KS)
    _after(EARLY)
    to = tl.program_id(0) * TOP_K + ks
    chosen = tl.load(ids + to, mask=ks < TOP_K, other=0)
    value = tl.load(weights + to, mask=ks < TOP_K, other=0.0)
    _find(
        chosen, value, ks, table, is_real, x, offsets, missed, host_experts, host_weights, host_x,
        host_count, host_rows, width, TOP_K, WIDTH, MISSES,
    )  # fmt: skip


@triton.jit
def _find(
    chosen, value, ks, table, is_real, x, offsets, missed, host_experts, host_weights, host_x,
    host_count, host_rows, width, TOP_K: tl.constexpr, WIDTH: tl.constexpr, MISSES: tl.constexpr,
):  # fmt: skip
    """Looks up the experts of one token."""
    batch = tl.program_id(0)
    real = ks < TOP_K
    to = batch * TOP_K + ks
    used = real & (tl.load(is_real + batch) != 0)
    offset = tl.load(table + chosen, mask=used, other=-(1 << 62))
    tl.store(offsets + to, offset, mask=real)
    if MISSES:
        absent = used & (offset == -(1 << 62))
        count = tl.sum(absent.to(tl.int32), 0)
        tl.store(missed + batch, count)
        tl.store(host_experts + to, tl.where(absent, chosen, -1), mask=real)
        tl.store(host_weights + to, value, mask=real)
        if batch == 0:
            tl.store(host_count, tl.num_programs(0) * TOP_K)
            tl.store(host_rows, tl.num_programs(0))
        columns = tl.arange(0, WIDTH)
        needed = (columns < width) & (count > 0)
        at = batch * width + columns
        tl.store(host_x + at, tl.load(x + at, mask=needed, other=0.0), mask=needed)


_Flags = tuple[tuple[Tensor, ...], int, int, bool]


def experts(
    x_BD: Tensor,
    weights_BK: Tensor,
    offsets_BK: Tensor,
    base: Tensor,
    d_hidden: int,
    activation: int,
    bias: bool,
    transposed: bool,
    request: Request | None = None,
) -> Tensor:
    """The weighted sum over the experts of each token that are on the device, [B, D], float32. The
    record of an expert begins at `base` plus its offset, in elements.
    `request` is sent to the CPU first."""
    batch, width = x_BD.shape
    top_k = offsets_BK.shape[1]
    hidden = torch.empty(batch * top_k, d_hidden, dtype=x_BD.dtype, device=x_BD.device)
    n_in = d_hidden if activation == GELU else 2 * d_hidden
    numel = n_in * width + width * d_hidden + (n_in + width if bias else 0)
    align = 16 if numel % 16 == 0 else 1  # of records, in elements
    sizes = width, d_hidden, n_in, top_k
    kind = activation, bias, transposed, align
    flags: _Flags = (offsets_BK,) * 3, batch, 0, x_BD.is_cuda
    if request is not None:
        flags = tuple(request), batch, _power(batch), x_BD.is_cuda
    if batch >= SEVERAL:
        return _experts_of_several(x_BD, weights_BK, offsets_BK, base, hidden, sizes, kind, flags)
    rows, block, warps = EXPERT_IN_TILE
    block = min(block, _power(width))
    if transposed:  # rows of the result are adjacent in memory
        rows, block = 64, 32
    _expert_in_kernel[(triton.cdiv(d_hidden, rows), batch * top_k)](
        x_BD, base, offsets_BK, hidden, *flags[0], flags[1], *sizes, *kind, rows, block, *flags[2:],
        num_warps=warps, **_early(x_BD.device),
    )  # fmt: skip
    out = torch.empty(batch, width, dtype=torch.float32, device=x_BD.device)
    rows, block, warps = EXPERT_OUT_TILE
    block = min(_power(d_hidden), block if d_hidden < _WIDE else _WIDE)
    if transposed:
        rows, block = 32, 32
    _expert_out_kernel[(triton.cdiv(width, rows), batch)](
        hidden, base, offsets_BK, weights_BK, out, width, n_in, d_hidden, top_k, *kind[1:], rows,
        block, num_warps=warps, **_early(x_BD.device),
    )  # fmt: skip
    return out


def _experts_of_several(
    x_BD: Tensor,
    weights_BK: Tensor,
    offsets_BK: Tensor,
    base: Tensor,
    hidden: Tensor,
    sizes: tuple[int, int, int, int],
    kind: tuple[int, bool, bool, int],
    flags: _Flags,
) -> Tensor:
    """An expert of several tokens is read once: the program of its first token computes all."""
    (batch, width), (_, d_hidden, _, top_k) = x_BD.shape, sizes
    tokens = max(16, _power(batch))
    common = batch, tokens, _power(top_k), GROUP_TILE.rows, GROUP_TILE.block, WIDEN
    pairs = batch * top_k
    _group_in_kernel[(triton.cdiv(d_hidden, GROUP_TILE.rows), pairs)](
        x_BD, base, offsets_BK, hidden, *flags[0], flags[1], *sizes, *kind, *common, *flags[2:],
        num_warps=GROUP_TILE.warps, **_early(x_BD.device),
    )  # fmt: skip
    parts = torch.empty(pairs, width, dtype=torch.float32, device=x_BD.device)
    _group_out_kernel[(triton.cdiv(width, GROUP_TILE.rows), pairs)](
        hidden, base, offsets_BK, parts, *sizes, *kind[1:], *common, num_warps=GROUP_TILE.warps,
        **_early(x_BD.device),
    )  # fmt: skip
    out = torch.empty(batch, width, dtype=torch.float32, device=x_BD.device)
    block = min(1024, _power(width))
    _sum_kernel[(triton.cdiv(width, block), batch)](
        parts, weights_BK, offsets_BK, out, width, top_k, _power(top_k), block, num_warps=4,
        **_early(x_BD.device),
    )  # fmt: skip
    return out


@triton.jit
def _expert_in_kernel(
    x, base, offsets, out, ready, done, missed, n_rows, width, hidden, n_in, top_k,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, REQUEST: tl.constexpr, ON_GPU: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    _after(EARLY)
    _request(ready, done, missed, n_rows, REQUEST, ON_GPU)
    offset = tl.load(offsets + pair)
    if offset == -(1 << 62):
        return
    record = base + tl.multiple_of(offset, ALIGN)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < hidden
    gate, up = rows, rows + hidden
    if ACTIVATION == 2:
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
        if ACTIVATION != 1:
            at = up[:, None] * width + columns[None, :]
            if TRANSPOSED:
                at = columns[None, :] * n_in + up[:, None]
            second += tl.load(record + at, mask=mask, other=0.0).to(tl.float32) * value
    g, u = tl.sum(first, 1), tl.sum(second, 1)
    kind = out.dtype.element_ty
    if BIAS:
        biases = record + n_in * width + width * hidden
        g += tl.load(biases + gate, mask=there, other=0.0).to(tl.float32)
        if ACTIVATION != 1:
            u += tl.load(biases + up, mask=there, other=0.0).to(tl.float32)
    result = _activate(g, u, kind, ACTIVATION)
    tl.store(out + pair * hidden + rows, result, mask=there)


@triton.jit
def _activate(g, u, kind: tl.constexpr, ACTIVATION: tl.constexpr):
    """Of what was rounded to `kind`, and rounded to it."""
    g, u = g.to(kind).to(tl.float32), u.to(kind).to(tl.float32)
    if ACTIVATION == 0:
        result = g * tl.sigmoid(g) * u
    elif ACTIVATION == 1:
        result = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    else:
        g = tl.minimum(g, 7.0)
        u = tl.minimum(tl.maximum(u, -7.0), 7.0)
        result = (u + 1.0) * g * tl.sigmoid(g * 1.702)
    return result.to(kind)


@triton.jit
def _expert_out_kernel(
    a, base, offsets, weights, out, width, n_in, HIDDEN: tl.constexpr, TOP_K: tl.constexpr,
    BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < width
    batch = tl.program_id(1)
    _after(EARLY)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    biases = tl.zeros((ROWS,), tl.float32)
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
            b = tl.load(record + width * HIDDEN + n_in + rows, mask=there & here, other=0.0)
            biases += b.to(tl.float32) * share
    result = tl.sum(total, 1)
    if BIAS:
        result += biases
    tl.store(out + batch * width + rows, result, mask=there)


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
def _group_in_kernel(
    x, base, offsets, out, ready, done, missed, n_rows, width, hidden, n_in, top_k,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, ALIGN: tl.constexpr,
    BATCH: tl.constexpr, TOKENS: tl.constexpr, KS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, REQUEST: tl.constexpr, ON_GPU: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    _after(EARLY)
    _request(ready, done, missed, n_rows, REQUEST, ON_GPU)
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
    if ACTIVATION == 2:
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
        if ACTIVATION != 1:
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
        if ACTIVATION != 1:
            u += tl.load(biases + up, mask=there, other=0.0).to(tl.float32)[:, None]
    result = _activate(g, u, out.dtype.element_ty, ACTIVATION)
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
    _after(EARLY)
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
def _sum_kernel(
    parts, weights, offsets, out, width, top_k, KS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    batch = tl.program_id(1)
    _after(EARLY)
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
