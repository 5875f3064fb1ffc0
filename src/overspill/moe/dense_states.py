"""Memory for the optimizer states of dense parameters."""

import weakref

import torch
from torch import Tensor

from overspill.core.interrupt import DeferredInterrupt
from overspill.core.lifetime import Lifetime, outside_engine_threads
from overspill.core.sizes import round_up
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab
from overspill.transfer.mapped import on_device


class DenseStates:
    """Hands out memory on the compute device, or pinned host memory that its kernels read and write
    over the link.

    In host memory each state has a slab of its own: a copy must not span two registrations. When no
    tensor refers to a slab any more, another state of its size can have it. Kernels may still use
    it then, so the device is synchronized before it is cleared or unpinned. Until the engine is
    closed, that happens when a state is allocated, not in the garbage collector, which may run in a
    thread that the device waits for.
    """

    def __init__(self, device: torch.device, on_host: bool, lifetime: Lifetime) -> None:
        self._device = device
        self._on_host = on_host
        self._lifetime = lifetime
        self._slabs: list[HostSlab] = []
        self._free: list[HostSlab] = []  # those to which no tensor refers
        self.device_bytes = 0

    def zeros(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """A new state of a parameter."""
        size = parameter.numel() * dtype.itemsize
        if not self._on_host or parameter.device.type != self._device.type or size == 0:
            state = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            self._count(size)
            weakref.finalize(state.untyped_storage(), self._count, -size).atexit = False
            return state
        with DeferredInterrupt():  # every slab is either free or will be given back
            slab = self._take(round_up(size, ALIGN))
            memory = slab[0][:size]
            if self._device.type == "cuda":
                state = on_device(memory, parameter.device)
            else:  # also with a storage of its own, whose end is noticed
                state = torch.from_numpy(memory.numpy())
            weakref.finalize(state.untyped_storage(), self._give_back, slab).atexit = False
        return state.view(dtype).view(parameter.shape)

    def _count(self, size: int) -> None:
        self.device_bytes += size

    def _take(self, size: int) -> HostSlab:
        for slab in self._free:
            if slab.nbytes == size:
                self._free.remove(slab)
                self._synchronize()
                slab[0].zero_()
                return slab
        self._release()  # what is free is of no use
        slab = HostSlab("dense optimizer states", 1, size, pinned=self._device.type == "cuda")
        self._slabs.append(slab)
        return slab

    def _give_back(self, slab: HostSlab) -> None:
        self._free.append(slab)
        if self._lifetime.closed:
            outside_engine_threads(self._release)

    def _release(self) -> None:
        if not self._free or self._lifetime.forked:
            return
        self._synchronize()
        while self._free:
            slab = self._free.pop()
            self._slabs.remove(slab)
            slab.close()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def host_bytes(self) -> int:
        return sum(slab.nbytes for slab in tuple(self._slabs))

    def close(self) -> None:
        """The engine was closed: memory is released as soon as no tensor refers to it."""
        self._release()
