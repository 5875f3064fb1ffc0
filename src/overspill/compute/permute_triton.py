# Triton is optional and untyped, and its compiler rejects annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Sum over the rows of each token as one kernel: it reads every row once, and writes no copy of the
rows in the order of tokens.

Shapes: T tokens, D model, K top-k, R token rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.launch_triton import Launch

_BLOCK = 1024
_WARPS = 4


def sum_over_k(
    y_RD: Tensor, inverse_TK: Tensor, weights_TK: Tensor | None, out_TD: Tensor, first: int
) -> None:
    """Writes the (weighted) sum of the rows `inverse_TK` of each token; `y_RD` begins with the row
    `first`. Sums are float32, in the order of K, and rounded once."""
    (n_tokens, top_k), d_model = inverse_TK.shape, y_RD.shape[1]
    tensors = y_RD, inverse_TK, inverse_TK if weights_TK is None else weights_TK, out_TD
    block = min(_BLOCK, triton.next_power_of_2(d_model))
    grid = n_tokens, triton.cdiv(d_model, block)
    _launch(grid, tensors, (d_model, top_k, weights_TK is not None, block), (first,))


@triton.jit(do_not_specialize=["first"])
def _sum_over_k(
    y_ptr,
    inverse_ptr,
    weights_ptr,  # not read without weights
    out_ptr,
    first,
    D_MODEL: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < D_MODEL
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(inverse_ptr + token * TOP_K + k) - first
        value = tl.load(y_ptr + row * D_MODEL + columns, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weights_ptr + token * TOP_K + k)
        total += value
    tl.store(out_ptr + token * D_MODEL + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


_launch = Launch(_sum_over_k, _WARPS)
