# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Grouped matrix products as Triton kernels, for GPUs on which torch has none.

Shapes: R rows sorted by group, n groups; `ends` (int32, on the device) holds the row at which each
group ends. The host never reads it: a grid covers any distribution of the R rows over the groups,
and each program finds its group on the device.

Sums are float32 and run in the order of the rows or columns, so results are reproducible. Block
sizes come from a fixed table, never from timings.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.launch_triton import Launch


class Blocks(NamedTuple):
    """Sizes of the tile that one program computes, and of its steps through the sum."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# All fit into the 99 KiB of shared memory that a block can have on compute capability 8.6 and 8.9.
PRODUCT_BLOCKS = {
    torch.bfloat16: (
        Blocks(16, 128, 64, warps=4, stages=4),
        Blocks(64, 128, 64, warps=4, stages=3),
        Blocks(128, 128, 64, warps=8, stages=3),
    ),
    torch.float32: (
        Blocks(16, 64, 32, warps=4, stages=4),
        Blocks(64, 64, 16, warps=4, stages=4),
        Blocks(128, 128, 16, warps=8, stages=4),
    ),
}
WEIGHT_GRAD_BLOCKS = {
    torch.bfloat16: (
        Blocks(128, 128, 32, warps=8, stages=3),
        Blocks(128, 128, 64, warps=8, stages=3),
    ),
    torch.float32: (
        Blocks(64, 64, 16, warps=4, stages=3),
        Blocks(128, 128, 16, warps=8, stages=4),
    ),
}

# Programs that run at the same time share this many row tiles, and all columns, through the L2.
_L2_TILES = 8
# Groups that a program compares with its tile at once when it looks for its own.
_SEARCH = 128
# Elements that one program of `_zero_empty` sets at once, and the programs of a group.
_ZERO_BLOCK = 4096
_ZERO_PROGRAMS = 32
# The interpreter, which runs the kernels in tests without a GPU, multiplies bfloat16 as integers.
WIDEN = triton.knobs.runtime.interpret


def product_blocks(dtype: torch.dtype, rows: int, groups: int) -> Blocks:
    """Return the largest tile that a group of average size fills."""
    small, *larger = PRODUCT_BLOCKS[dtype]
    fitting = [blocks for blocks in larger if blocks.m * groups <= rows]
    return fitting[-1] if fitting else small


def weight_grad_blocks(dtype: torch.dtype, rows: int, groups: int) -> Blocks:
    short, long = WEIGHT_GRAD_BLOCKS[dtype]
    return short if rows <= short.k * groups else long


def product(a_RK: Tensor, w_nKN: Tensor, ends: Tensor) -> Tensor:
    """Return [R, N]: the rows of each group times its matrix; rows behind the last end stay
    undefined.

    Strides are arbitrary, so a transposed view of stored weights needs no copy.
    """
    (rows, k), (groups, _, n) = a_RK.shape, w_nKN.shape
    assert w_nKN.shape[1] == k
    assert ends.shape == (groups,)
    assert ends.is_contiguous()
    c_RN = a_RK.new_empty(rows, n)
    blocks = product_blocks(a_RK.dtype, rows, groups)
    row_tiles = rows // blocks.m + groups  # as many as `_tile_of_rows` numbers
    with torch.cuda.device_of(a_RK):
        _product[(row_tiles * triton.cdiv(n, blocks.n),)](
            a_RK,
            w_nKN,
            c_RN,
            ends,
            groups,
            n,
            k,
            *a_RK.stride(),
            *w_nKN.stride(),
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            BLOCK_K=blocks.k,
            EVEN_K=k % blocks.k == 0,
            L2_TILES=_L2_TILES,
            SEARCH=_SEARCH,
            PRECISION=_precision(a_RK.dtype),
            WIDEN=WIDEN,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return c_RN


def weight_grad(a_RM: Tensor, b_RN: Tensor, ends: Tensor) -> Tensor:
    """Return [n, M, N]: for each group, a^T times b over its rows; zeros for a group without
    rows."""
    (rows, m), n, groups = a_RM.shape, b_RN.shape[1], ends.shape[0]
    assert b_RN.shape[0] == rows
    assert ends.is_contiguous()
    dw_nMN = a_RM.new_empty(groups, m, n)
    blocks = weight_grad_blocks(a_RM.dtype, rows, groups)
    with torch.cuda.device_of(a_RM):
        _weight_grad[(groups * triton.cdiv(m, blocks.m) * triton.cdiv(n, blocks.n),)](
            a_RM,
            b_RN,
            dw_nMN,
            ends,
            m,
            n,
            *a_RM.stride(),
            *b_RN.stride(),
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            BLOCK_K=blocks.k,
            L2_TILES=_L2_TILES,
            PRECISION=_precision(a_RM.dtype),
            WIDEN=WIDEN,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    return dw_nMN


def zero_empty(dw_nMN: Tensor, ends: Tensor) -> None:
    """Sets the matrices of groups without rows to zero and does not touch the others."""
    groups, size = dw_nMN.shape[0], dw_nMN[0].numel()
    assert dw_nMN.is_contiguous()
    grid = groups, min(_ZERO_PROGRAMS, triton.cdiv(size, _ZERO_BLOCK))
    _launch_zero_empty(grid, (dw_nMN, ends), (_ZERO_BLOCK,), (size,))


def _precision(dtype: torch.dtype) -> str:
    """Return the precision of float32 products: TF32 if the user has allowed it for `torch.mm`."""
    tf32 = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


@triton.jit
def _tile_of_rows(tile, ends_ptr, n_groups, BLOCK_M: tl.constexpr, SEARCH: tl.constexpr):
    """Return (group, first row, end of the group) of a row tile, which may have no rows.

    Group g gets the tiles from start // BLOCK_M + g on, where start is its first row. These numbers
    rise with g and leave each group enough tiles, so no sum over the groups is needed.
    """
    not_behind = 0
    for first in range(0, n_groups, SEARCH):
        groups = first + tl.arange(0, SEARCH)
        inside = groups < n_groups
        starts = tl.load(ends_ptr + groups - 1, mask=inside & (groups > 0), other=0)
        found = inside & (starts // BLOCK_M + groups <= tile)
        not_behind += tl.sum(found.to(tl.int32), axis=0)
    group = not_behind - 1
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    row = start + (tile - start // BLOCK_M - group) * BLOCK_M
    return group, row, end


@triton.jit
def _add_dot(a, b, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["n_groups"])
def _product(
    a_ptr,
    w_ptr,
    c_ptr,
    ends_ptr,
    n_groups,
    N,
    K,
    stride_ar,
    stride_ak,
    stride_wg,
    stride_wk,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    L2_TILES: tl.constexpr,
    SEARCH: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    program, n_tiles = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    m_tiles = tl.num_programs(0) // n_tiles
    m_tile, n_tile = tl.swizzle2d(program // n_tiles, program % n_tiles, m_tiles, n_tiles, L2_TILES)
    group, row, end = _tile_of_rows(m_tile, ends_ptr, n_groups, BLOCK_M, SEARCH)
    if row >= end:
        return
    m = tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside, n_inside = (m < end - row)[:, None], (n < N)[None, :]
    # Rows times strides, and weights of many groups, can pass 2^31; offsets inside a tile cannot.
    row = row.to(tl.int64)
    a_ptrs = a_ptr + row * stride_ar + (m[:, None] * stride_ar + k[None, :] * stride_ak)
    w_ptrs = w_ptr + group.to(tl.int64) * stride_wg
    w_ptrs += k[:, None] * stride_wk + n[None, :] * stride_wn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=m_inside, other=0.0)
            w = tl.load(w_ptrs, mask=n_inside, other=0.0)
        else:
            k_inside = k < K - k_start
            a = tl.load(a_ptrs, mask=m_inside & k_inside[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=n_inside & k_inside[:, None], other=0.0)
        total = _add_dot(a, w, total, PRECISION, WIDEN)
        a_ptrs += BLOCK_K * stride_ak
        w_ptrs += BLOCK_K * stride_wk
    c_ptrs = c_ptr + row * N + (m[:, None] * N + n[None, :])
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=m_inside & n_inside)


@triton.jit
def _weight_grad(
    a_ptr,
    b_ptr,
    dw_ptr,
    ends_ptr,
    M,
    N,
    stride_ar,
    stride_am,
    stride_br,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L2_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    m_tiles, n_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (m_tiles * n_tiles)
    tile = tl.program_id(0) % (m_tiles * n_tiles)
    m_tile, n_tile = tl.swizzle2d(tile // n_tiles, tile % n_tiles, m_tiles, n_tiles, L2_TILES)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    n_rows = tl.load(ends_ptr + group) - start
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside, n_inside = (m < M)[:, None], (n < N)[None, :]
    first = start.to(tl.int64)
    a_ptrs = a_ptr + first * stride_ar + (m[:, None] * stride_am + k[None, :] * stride_ar)
    b_ptrs = b_ptr + first * stride_br + (k[:, None] * stride_br + n[None, :] * stride_bn)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_start in range(0, n_rows, BLOCK_K):
        # Both sides are masked: rows of the next group may hold anything, NaN too.
        k_inside = k < n_rows - k_start
        a = tl.load(a_ptrs, mask=m_inside & k_inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=n_inside & k_inside[:, None], other=0.0)
        total = _add_dot(a, b, total, PRECISION, WIDEN)
        a_ptrs += BLOCK_K * stride_ar
        b_ptrs += BLOCK_K * stride_br
    dw_ptrs = dw_ptr + group.to(tl.int64) * M * N + (m[:, None] * N + n[None, :])
    tl.store(dw_ptrs, total.to(dw_ptr.dtype.element_ty), mask=m_inside & n_inside)


@triton.jit
def _zero_empty(dw_ptr, ends_ptr, size, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    if tl.load(ends_ptr + group) > start:
        return
    zeros = tl.zeros((BLOCK,), dtype=dw_ptr.dtype.element_ty)
    dw_ptr += group.to(tl.int64) * size
    for first in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        tl.store(dw_ptr + offsets, zeros, mask=offsets < size)


_launch_zero_empty = Launch(_zero_empty, warps=4)
