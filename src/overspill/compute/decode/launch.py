# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Launches of kernels that begin before the kernel before them has ended."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def power(n: int) -> int:
    """Return the smallest power of 2 that is not below `n`."""
    return int(triton.next_power_of_2(n))


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Return the options of a launch that does not wait for the kernel before it."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@triton.jit
def after(EARLY: tl.constexpr):
    """Waits for the kernels before this one, and lets the next kernel begin, which waits for this
    one at the same call. Only memory that no kernel writes may be read before this call."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Waits for the kernels before this one, whose results may be read from here on. If the kernel
    before this one waits before it lets this one begin, results of still earlier kernels may be
    read at once."""
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Lets the next kernel begin, which waits for this one."""
    if EARLY:
        gdc_launch_dependents()
