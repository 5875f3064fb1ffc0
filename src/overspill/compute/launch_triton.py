# Triton is optional and untyped.
# mypy: disable-error-code="import-not-found,import-untyped"
"""Launches Triton kernels without Triton's look-up of the compiled kernel, which takes several
times as long as the launch: small batches would wait for the host."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

_ALIGNED = 16
"""Alignment in bytes. Triton compiles one kernel for pointers with it, and another for other
pointers."""


class Launch:
    """A kernel whose arguments are tensors on one GPU, then numbers, then constants of its
    compilation."""

    def __init__(self, kernel: Any, warps: int) -> None:
        self._kernel, self._warps = kernel, warps
        self._interpreted = not isinstance(kernel, triton.JITFunction)
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor, ...],
        constants: tuple[object, ...],
        numbers: tuple[float, ...] = (),
    ) -> None:
        device = tensors[0].device
        with _on(device):
            if self._interpreted:
                self._kernel[grid](*tensors, *numbers, *constants, num_warps=self._warps)
                return
            types = ((tensor.dtype, tensor.data_ptr() % _ALIGNED == 0) for tensor in tensors)
            key = device, constants, *types, *map(_kind, numbers)
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._kernel.warmup(
                    *tensors, *numbers, *constants, grid=grid, num_warps=self._warps
                )
                self._compiled[key] = compiled
            compiled[*grid, 1](*tensors, *numbers, *constants)


def _kind(number: float) -> object:
    """Return the kind of a number: Triton compiles kernels of their own for 1, for multiples of 16
    and for integers of 64 bits."""
    if isinstance(number, float):
        return float
    return number == 1, number % _ALIGNED == 0, -(1 << 31) <= number < 1 << 31


def _on(device: torch.device) -> AbstractContextManager[object]:
    here = device.type != "cuda" or device.index in (None, torch.cuda.current_device())
    return nullcontext() if here else torch.cuda.device(device)
