# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Chooses the experts of each token and looks up their places."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.decode.launch import after, early, power
from overspill.compute.misses import MissBuffers


class PinnedExperts(NamedTuple):
    """Experts in pinned memory that the GPU reads over PCIe while the CPU computes the other
    missing experts."""

    table_E: Tensor  # their offsets
    share: int  # of the missing experts, in sixteenths


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
    scale: float = 1.0,
) -> Routed:
    """Chooses experts, writes their ids to `ids_BK` and looks up their places; `scale` multiplies
    their weights. With `given` the ids in `ids_BK` are used, with the weights of the experts that
    the logits choose. With `misses`, experts that are not on the device are written there with
    their token rows: -1 stands for an expert that is on the device. Rows that are not real have no
    experts."""
    n_experts, width, stride = logits_BE.shape[1], x_BD.shape[1], logits_BE.stride(0)
    weights = torch.empty(len(x_BD), top_k, dtype=torch.float32, device=x_BD.device)
    offsets, missed, to = _found(weights, ids_BK, misses)
    _route_kernel[(len(x_BD),)](
        logits_BE, table_E, real_B, x_BD, ids_BK, weights, offsets, *to, n_experts, width, stride,
        scale, top_k, power(top_k), power(n_experts), power(width), softmax_first, normalize,
        misses is not None, given, num_warps=1, **early(x_BD.device),
    )  # fmt: skip
    return Routed(weights, offsets, missed)


def look_up(
    ids_BK: Tensor,
    weights_BK: Tensor,
    table_E: Tensor,
    real_B: Tensor,
    x_BD: Tensor,
    misses: MissBuffers | None,
    link: PinnedExperts | None = None,
    staged_E: Tensor | None = None,
) -> Routed:
    """Looks up the places of experts that are chosen already, like `route`. Experts that `table_E`
    does not have may be staged, or read from pinned memory. `staged_E` may be written on another
    stream, for which this one waits."""
    offsets, missed, to = _found(weights_BK, ids_BK, misses)
    (batch, top_k), width = ids_BK.shape, x_BD.shape[1]
    link_E, share = link or (table_E, 0)
    tables = table_E, table_E if staged_E is None else staged_E, link_E
    # a launch that begins early waits for the kernel before it, and not for other streams
    how = early(x_BD.device) if staged_E is None else {"EARLY": False}
    _look_up_kernel[(batch,)](
        ids_BK, weights_BK, *tables, real_B, x_BD, offsets, *to, width, batch, len(table_E),
        top_k, power(top_k), power(width), power(batch), power(len(table_E)), share,
        staged_E is not None, misses is not None, num_warps=4 if share else 1, **how,
    )  # fmt: skip
    return Routed(weights_BK, offsets, missed)


def _found(
    weights_BK: Tensor, ids_BK: Tensor, misses: MissBuffers | None
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Return memory for offsets, for the number of misses of each token, and for lists of
    misses."""
    offsets = torch.empty_like(weights_BK, dtype=torch.int64)
    if misses is None:
        return offsets, None, (ids_BK,) * 6
    missed = torch.empty_like(ids_BK[:, 0])
    to = misses.experts_P, misses.weights_P, misses.x_RD, misses.count, misses.n_rows
    return offsets, missed, (missed, *to)


@triton.jit
def _route_kernel(
    logits, table, is_real, x, ids, weights, offsets, missed, host_experts, host_weights, host_x,
    host_count, host_rows, n_experts, width, row_width, scale, TOP_K: tl.constexpr,
    KS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SOFTMAX_FIRST: tl.constexpr,
    NORMALIZE: tl.constexpr, MISSES: tl.constexpr, GIVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    after(EARLY)
    experts, ks = tl.arange(0, BLOCK), tl.arange(0, KS)
    inside = experts < n_experts
    score = tl.load(logits + batch * row_width + experts, mask=inside, other=float("-inf"))
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
    value *= scale
    to = batch * TOP_K + ks
    if GIVEN:
        chosen = tl.load(ids + to, mask=real, other=0)
    else:
        tl.store(ids + to, chosen, mask=real)
    tl.store(weights + to, value, mask=real)
    used = real & (tl.load(is_real + batch) != 0)
    offset = tl.load(table + chosen, mask=used, other=-(1 << 62))
    _report(
        chosen, value, offset, used, x, offsets, missed, host_experts, host_weights, host_x,
        host_count, host_rows, width, TOP_K, KS, WIDTH, MISSES,
    )  # fmt: skip


@triton.jit
def needed_experts(
    ids, is_real, n_rows, TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return for each expert whether any token needs it."""
    experts, rows = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    there = (rows < n_rows) & (tl.load(is_real + rows, mask=rows < n_rows, other=0) != 0)
    needed = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(TOP_K):
        found = tl.load(ids + rows * TOP_K + k, mask=there, other=-1)
        needed = tl.maximum(needed, tl.max((found[:, None] == experts[None, :]).to(tl.int32), 0))
    return needed > 0


@triton.jit
def _look_up_kernel(
    ids, weights, table, staged, link, is_real, x, offsets, missed, host_experts, host_weights,
    host_x, host_count, host_rows, width, n_rows, n_experts, TOP_K: tl.constexpr, KS: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr,
    STAGED: tl.constexpr, MISSES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ks = tl.arange(0, KS)
    after(EARLY)
    batch = tl.program_id(0)
    to = batch * TOP_K + ks
    chosen = tl.load(ids + to, mask=ks < TOP_K, other=0)
    value = tl.load(weights + to, mask=ks < TOP_K, other=0.0)
    used = (ks < TOP_K) & (tl.load(is_real + batch) != 0)
    offset = tl.load(table + chosen, mask=used, other=-(1 << 62))
    if STAGED:
        absent = used & (offset == -(1 << 62))
        offset = tl.where(absent, tl.load(staged + chosen, mask=absent, other=0), offset)
    if SHARE > 0:
        # every row chooses the same: of the experts that any row misses, some are read over PCIe
        experts = tl.arange(0, BLOCK)
        inside = experts < n_experts
        place = tl.load(table + experts, mask=inside, other=0)
        if STAGED:
            other = tl.load(staged + experts, mask=inside, other=0)
            place = tl.where(place == -(1 << 62), other, place)
        needed = needed_experts(ids, is_real, n_rows, TOP_K, ROWS, BLOCK)
        missing = needed & (place == -(1 << 62))
        before = tl.cumsum(missing.to(tl.int32), 0)
        linked = missing & (before * SHARE // 16 > (before - 1) * SHARE // 16)
        own = (chosen[:, None] == experts[None, :]) & linked[None, :]
        over = used & (tl.max(own.to(tl.int32), 1) > 0)
        offset = tl.where(over, tl.load(link + chosen, mask=over, other=0), offset)
    _report(
        chosen, value, offset, used, x, offsets, missed, host_experts, host_weights, host_x,
        host_count, host_rows, width, TOP_K, KS, WIDTH, MISSES,
    )  # fmt: skip


@triton.jit
def _report(
    chosen, value, offset, used, x, offsets, missed, host_experts, host_weights, host_x,
    host_count, host_rows, width, TOP_K: tl.constexpr, KS: tl.constexpr, WIDTH: tl.constexpr,
    MISSES: tl.constexpr,
):  # fmt: skip
    """Writes the places of the experts of one token, and the missing experts."""
    batch = tl.program_id(0)
    ks = tl.arange(0, KS)
    real = ks < TOP_K
    to = batch * TOP_K + ks
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
