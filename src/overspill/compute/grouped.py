"""Matrix products over groups of rows, one kernel for all groups, and the choice of that kernel.

Shapes: R rows sorted by group, n groups; `ends` (int32, on the device) are the cumulative row
counts, `counts` the same on the host, not cumulated.

| backend | what it is                             | where it is used                          |
|---------|----------------------------------------|-------------------------------------------|
| torch   | `torch.nn.functional.grouped_mm`       | capability 9 and 10; bfloat16, aligned    |
| triton  | `grouped_triton`                       | otherwise from 8 on; bfloat16             |
| single  | one product, without groups            | a resident layer with one expert, any GPU |
| loop    | no grouped kernel: a loop over experts | everywhere else, and without rows         |

Waves of streamed experts never use "single": which experts are computed together depends on
transfers, and the results of an expert must not. Below capability 9 `grouped_mm` is itself a loop
over groups that first copies the ends to the host.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.core.experts import ExpertShape
from overspill.hardware.native import has_triton

_log = logging.getLogger(__name__)

Backend = Literal["torch", "triton", "single", "loop"]

# The kernel behind grouped_mm has one thread a group in its set-up block.
_MAX_TORCH_GROUPS = 1024
# exact float32 products are slower in Triton than one by one in cuBLAS (record grouped-triton)
_TRITON_DTYPES = (torch.bfloat16,)

_forced: Backend | None = None


@contextlib.contextmanager
def forced(backend: Backend) -> Iterator[None]:
    """Uses `backend` for every wave, in tests and benchmarks; raises where it cannot compute one.

    Applies to all threads, because autograd runs backward on a thread of its own.
    """
    global _forced
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def backend_for(
    x_RD: Tensor, weights: Tensor, shape: ExpertShape, resident: bool = False
) -> Backend:
    """Return the backend of a wave with these rows and records. A loop on a GPU is logged once."""
    if _forced is not None:
        return _forced
    if not x_RD.is_cuda or x_RD.shape[0] == 0:
        return "loop"
    if resident and weights.shape[0] == 1:
        return "single"
    capability = _capability(x_RD.device)
    if capability in (9, 10) and _fits_torch(x_RD, weights, shape):
        return "torch"
    if capability >= 8 and x_RD.dtype in _TRITON_DTYPES and has_triton("grouped products"):
        return "triton"
    _log_loop(x_RD.dtype, capability)
    return "loop"


def product(backend: Backend, a_RK: Tensor, w_nKN: Tensor, ends: Tensor) -> Tensor:
    """Return [R, N]: the rows of each group times its matrix."""
    if backend == "single":
        return torch.mm(a_RK, w_nKN[0])
    if backend == "triton":
        from overspill.compute import grouped_triton

        return grouped_triton.product(a_RK, w_nKN, ends)
    return F.grouped_mm(a_RK, w_nKN, offs=ends)


def weight_grad(
    backend: Backend, a_RM: Tensor, b_RN: Tensor, ends: Tensor, counts: Sequence[int] | None
) -> Tensor:
    """Return [n, M, N]: for each group, a^T times b over its rows; zeros for a group without
    rows."""
    if backend == "single":
        return torch.mm(a_RM.t(), b_RN).unsqueeze(0)
    if backend == "triton":
        from overspill.compute import grouped_triton

        return grouped_triton.weight_grad(a_RM, b_RN, ends)
    dw_nMN = F.grouped_mm(a_RM.t(), b_RN, offs=ends)
    _zero_empty(dw_nMN, ends, counts)
    return dw_nMN


def _zero_empty(dw_nMN: Tensor, ends: Tensor, counts: Sequence[int] | None) -> None:
    """Sets the gradients of groups without rows to zero. grouped_mm does not specify them: on
    Hopper it writes zeros, on Blackwell it leaves garbage (pytorch#172439)."""
    if counts is None and has_triton("empty groups"):
        from overspill.compute import grouped_triton

        grouped_triton.zero_empty(dw_nMN, ends)
    elif counts is None:
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        dw_nMN.masked_fill_(empty.view(-1, 1, 1), 0)
    else:
        for group, count in enumerate(counts):
            if count == 0:
                dw_nMN[group].zero_()


def _fits_torch(x_RD: Tensor, weights: Tensor, shape: ExpertShape) -> bool:
    # The kernel loads 16 bytes at once: rows of matrices and records must be aligned to that.
    return (
        x_RD.dtype is torch.bfloat16
        and shape.d_model % 8 == 0
        and shape.d_hidden % 8 == 0
        and weights.stride(0) % 8 == 0
        and weights.data_ptr() % 16 == 0
        and weights.shape[0] < _MAX_TORCH_GROUPS
    )


@functools.cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def _log_loop(dtype: torch.dtype, capability: int) -> None:
    _log.warning(
        "no grouped kernel for %s on this GPU (compute capability %d): experts of a wave run one "
        "by one (slower); use bfloat16, Triton, and a GPU of capability 8 or above",
        dtype,
        capability,
    )
