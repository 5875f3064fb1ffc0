"""Host memory for what belongs to dense parameters: optimizer states, weights and gradients."""

import threading
import weakref

import torch
from torch import Tensor

from overspill.core.interrupt import DeferredInterrupt
from overspill.core.lifetime import Lifetime, outside_engine_threads
from overspill.core.sizes import round_up
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab
from overspill.transfer.mapped import on_device


class DenseMemory:
    """Hands out pinned host memory as tensors of the compute device, whose kernels read and write
    it over the link.

    Each tensor has a slab of its own: a copy must not span two registrations. When no tensor refers
    to a slab any more, another tensor of its size can have it. Kernels may still use it then, so
    the device is synchronized before the host clears or unpins it. Until the engine is closed, that
    happens when memory is allocated, not in the garbage collector, which may run in a thread that
    the device waits for.
    """

    def __init__(self, device: torch.device, lifetime: Lifetime) -> None:
        self._device = device
        self._lifetime = lifetime
        # of threads that run a backward at once; a tensor may end in any allocation within it
        self._lock = threading.RLock()
        self._slabs: dict[int, HostSlab] = {}  # by address
        self._free: list[HostSlab] = []  # those to which no tensor refers
        self.device_bytes = 0
        """Bytes of optimizer states on the device."""

    def zeros(self, parameter: Tensor, dtype: torch.dtype, on_host: bool = True) -> Tensor:
        """A new optimizer state of a parameter."""
        if on_host and parameter.device.type == self._device.type and parameter.numel():
            return self._new(parameter, dtype, clear=True)
        state = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        self._count(state.nbytes)
        weakref.finalize(state.untyped_storage(), self._count, -state.nbytes).atexit = False
        return state

    def _count(self, size: int) -> None:
        self.device_bytes += size

    def empty_like(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor, which only work of the current stream may write first."""
        return self._new(tensor, tensor.dtype, clear=False)

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._slabs

    def _new(self, like: Tensor, dtype: torch.dtype, clear: bool) -> Tensor:
        size = like.numel() * dtype.itemsize
        with self._lock, DeferredInterrupt():  # every slab is either free or will be given back
            slab = self._take(round_up(size, ALIGN), clear)
            memory = slab[0][:size]
            if self._device.type == "cuda":
                new = on_device(memory, self._device)
            else:  # also with a storage of its own, whose end is noticed
                new = torch.from_numpy(memory.numpy())
            weakref.finalize(new.untyped_storage(), self._give_back, slab).atexit = False
        return new.view(dtype).view(like.shape)

    def _take(self, size: int, clear: bool) -> HostSlab:
        for slab in self._free:
            if slab.nbytes == size:
                self._free.remove(slab)
                if clear:
                    self._synchronize()
                    slab[0].zero_()
                return slab
        self._release()  # what is free is of no use
        what = "dense optimizer states" if clear else "dense weights and gradients"
        slab = HostSlab(what, 1, size, pinned=self._device.type == "cuda")
        self._slabs[slab[0].data_ptr()] = slab
        return slab

    def _give_back(self, slab: HostSlab) -> None:
        self._free.append(slab)
        if self._lifetime.closed:
            outside_engine_threads(self._release)

    def _release(self) -> None:
        if not self._free or self._lifetime.forked:
            return
        with self._lock:
            self._synchronize()
            while self._free:
                slab = self._free.pop()
                del self._slabs[slab[0].data_ptr()]
                slab.close()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def host_bytes(self) -> int:
        return sum(slab.nbytes for slab in tuple(self._slabs.values()))

    def close(self) -> None:
        """The engine was closed: memory is released as soon as no tensor refers to it."""
        self._release()
