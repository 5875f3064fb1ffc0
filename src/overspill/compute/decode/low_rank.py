# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Low-rank parts of experts in a decoding step: B @ (A @ x) is added to products of the weights.

A kernel of its own computes A @ x of each pair of a token and an expert; the kernels that multiply
the weights multiply B, which is short, and add it to their sums. It waits for the kernel before it,
so the kernels of one token begin at once, and wait for it where they multiply B.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.codes_triton import Matrix
from overspill.compute.decode.cpu import RequestArguments, send_request
from overspill.compute.decode.launch import early, let_next_begin, power, wait
from overspill.compute.decode.packing import at_record, by_places
from overspill.compute.decode.words import input_factors
from overspill.tiers.layout import LowRankPlanes, RecordLayout

_BLOCK = 2048
_RANKS = tl.constexpr(16)
"""Number of ranks that a product with several tokens sums at once: the fewest that `tl.dot` has."""


class LowRankMatrices(NamedTuple):
    """The low-rank matrices of one matrix in a record, as a constant of kernels."""

    a: int
    b: int
    rank: int
    padded: int
    lanes: int
    """Power of 2 that is not below the rank."""
    in_bytes: bool
    """Whether the offsets of records count bytes instead of elements of these matrices."""


class LowRankRecords(NamedTuple):
    """The low-rank parts of w_in and w_out in records, and their memory in the dtype of both."""

    memory: Tensor
    w_in: LowRankMatrices | None
    w_out: LowRankMatrices | None


class LowRankPart(NamedTuple):
    """Arguments of a kernel that multiplies weights: memory, A @ x of each pair, and constants."""

    memory: Tensor
    shrunk: Tensor
    factors: LowRankMatrices | None


def low_rank_records(layout: RecordLayout, base: Tensor) -> LowRankRecords | None:
    """Return the low-rank parts of records, which are found relative to `base`; None if there are
    none."""
    if not any(layout.ranks):
        return None
    packed = layout.format is not None
    return LowRankRecords(
        layout.computed(base), *(_factors(planes, packed) for planes in layout.low_rank)
    )


def _factors(planes: LowRankPlanes | None, packed: bool) -> LowRankMatrices | None:
    if planes is None:
        return None
    return LowRankMatrices(
        planes.a, planes.b, planes.rank, planes.padded, power(planes.rank), packed
    )


def shrink(
    x_ND: Tensor,
    memory: Tensor,
    factors: LowRankMatrices | None,
    offsets_BK: Tensor,
    flags: RequestArguments,
    matrix: Matrix | None = None,
    scaled: bool = False,
) -> LowRankPart:
    """Return A @ x of the experts of each token that are on the device; `x_ND` has a row for each
    token, or for each pair. `flags` send a request to the CPU first; without `factors` nothing is
    launched. With `matrix` the inputs are in its order, `by_places`; with `scaled` they are
    multiplied by its `input_factors`."""
    if factors is None:
        return LowRankPart(memory, memory, None)
    pairs, width = offsets_BK.numel(), x_ND.shape[1]
    shrunk = torch.empty(pairs, factors.padded, dtype=torch.float32, device=x_ND.device)
    _shrink_kernel[(factors.rank, pairs)](
        x_ND, memory, offsets_BK, shrunk, *flags.values, width, pairs // len(x_ND), factors, matrix,
        scaled, min(_BLOCK, power(width)), *flags.constants, num_warps=4, **early(x_ND.device),
    )  # fmt: skip
    return LowRankPart(memory, shrunk, factors)


@triton.jit
def _shrink_kernel(
    x, low, offsets, out, ready, done, missed, n_rows, width, top_k, LOW: tl.constexpr,
    MATRIX: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, REQUEST: tl.constexpr,
    ON_GPU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, pair = tl.program_id(0), tl.program_id(1)
    wait(EARLY)
    let_next_begin(EARLY)  # it may read results of kernels before this one
    send_request(ready, done, missed, n_rows, REQUEST, ON_GPU)
    offset = tl.load(offsets + pair)
    if offset == -(1 << 62):
        return
    a = low_rank_of(low, offset, LOW) + LOW.a + row * width
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        at = columns
        if MATRIX is not None:
            at = by_places(columns, MATRIX)
        value = tl.load(x + pair // top_k * width + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:  # by powers of 2
            value /= input_factors(columns, MATRIX)
        total += tl.load(a + columns, mask=inside, other=0.0).to(tl.float32) * value
    tl.store(out + pair * LOW.padded + row, tl.sum(total, 0))


@triton.jit
def low_rank_of(low, offset, LOW: tl.constexpr):
    """Return the low-rank matrices of the record at this offset."""
    if LOW.in_bytes:
        return at_record(low, offset)
    return low + tl.multiple_of(offset, 16)


@triton.jit
def expand(low, offset, shrunk, rows, there, LOW: tl.constexpr):
    """Return the terms of rows of B @ (A @ x) of one pair for each rank; A @ x is at `shrunk`."""
    ranks = tl.arange(0, LOW.lanes)
    inside = ranks < LOW.rank
    at = low_rank_of(low, offset, LOW) + LOW.b + rows[:, None] * LOW.padded + ranks[None, :]
    b = tl.load(at, mask=there[:, None] & inside[None, :], other=0.0)
    value = tl.load(shrunk + ranks, mask=inside, other=0.0)
    return b.to(tl.float32) * value[None, :]


@triton.jit
def sum_expanded(
    low, offsets, weights, shrunk, first, rows, there, TOP_K: tl.constexpr, ROWS: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """Return rows of the weighted sum of B @ (A @ x) over the experts of a token, whose pairs begin
    at `first`."""
    LANES: tl.constexpr = LOW.lanes
    terms = tl.zeros((ROWS, LANES), tl.float32)
    for k in tl.static_range(TOP_K):
        pair = first + k
        offset = tl.load(offsets + pair)
        here = offset != -(1 << 62)
        share = tl.load(weights + pair, mask=here, other=0.0)
        own = expand(low, offset, shrunk + pair * LOW.padded, rows, there & here, LOW)
        terms += tl.where(here, own, 0.0) * share
    return tl.sum(terms, 1)


@triton.jit
def add_expanded(
    total, low, offset, shrunk, to, member, rows, there, LOW: tl.constexpr,
):  # fmt: skip
    """Adds rows of B @ (A @ x) of several pairs with the same expert."""
    b = low_rank_of(low, offset, LOW) + LOW.b
    for start in range(0, LOW.rank, _RANKS):
        ranks = start + tl.arange(0, _RANKS)
        inside = ranks < LOW.rank
        w = tl.load(
            b + rows[:, None] * LOW.padded + ranks[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        value = tl.load(
            shrunk + to[None, :] * LOW.padded + ranks[:, None],
            mask=member[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(w.to(tl.float32), value, total, input_precision="ieee")
    return total
