# Triton is optional and untyped, and its compiler rejects annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Kernels that let a stream take a given time: one thread waits for the GPU's clock."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


def begin(clock: Tensor) -> None:
    """Writes the time, in nanoseconds, at which the current stream gets here."""
    _begin[(1,)](clock, num_warps=1)


def hold(clock: Tensor, nanoseconds: int) -> None:
    """The current stream goes on when this time has passed since `begin`, at once if it has."""
    _hold[(1,)](clock, nanoseconds, num_warps=1)


def new_clock(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


@triton.jit
def _begin(clock_ptr):
    tl.store(clock_ptr, globaltimer())


@triton.jit(do_not_specialize=["nanoseconds"])
def _hold(clock_ptr, nanoseconds):
    end = tl.load(clock_ptr) + nanoseconds
    now = globaltimer()
    while now < end:
        now = globaltimer()
