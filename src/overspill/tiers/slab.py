"""Memory allocated once: a slab is one allocation divided into slots."""

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate

import torch
from torch import Tensor

from overspill.core.errors import BudgetError
from overspill.core.sizes import format_size
from overspill.tiers.layout import ALIGN

log = logging.getLogger("overspill")

Progress = Callable[[str, int, int], None]
"""Called with (description, bytes done, total bytes) during long operations."""

_PIECE_BYTES = 256 << 20
_THREADS = 8
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK on Linux; the mmap module does not define it

registered: dict[int, int] = {}
"""Bytes of host memory registered with CUDA, by address, of all slabs. Memory that is freed without
being unregistered would make a later registration of its address fail."""


class HostSlab:
    """Page-aligned host memory: `slots` of `slot_bytes` each, or of `sizes`, page-locked for the
    GPU if `pinned`.

    It is anonymous memory registered with CUDA. Torch's allocator for pinned memory rounds up to a
    power of two: 58 GB would become 64. Several threads touch and register it in pieces, because
    one thread would need half a minute. With `background`, the constructor returns before they are
    done and slots can already be filled; `wait_allocated` waits for the threads.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        slot_bytes: int,
        pinned: bool,
        progress: Progress | None = None,
        background: bool = False,
        piece_bytes: int = _PIECE_BYTES,
        memory: Tensor | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """`memory` is memory for the slots that is allocated already, and may have content."""
        self._registered: list[int] = []  # first: __del__ reads them
        self._pieces: list[Future[int]] = []
        sizes = [slot_bytes] * slots if sizes is None else sizes
        assert len(sizes) == slots
        assert all(size % ALIGN == 0 for size in (slot_bytes, *sizes))
        self.name = name
        self.nbytes = sum(sizes)
        self._slot_bytes = slot_bytes
        self._pinned = pinned
        self._more: list[HostSlab] = []  # slots that were added
        self._process = os.getpid()
        self._threads: ThreadPoolExecutor | None = None
        self._piece_sizes = _piece_sizes(sizes, piece_bytes)
        self._views: tuple[Tensor, ...] = ()
        if slots == 0:
            self.memory = torch.empty(0, dtype=torch.uint8)
            return
        touch = memory is None and not background
        if memory is None:
            memory = self._new_memory()
        self.memory = memory[: self.nbytes]
        """All slots, one behind the other, without those that were added."""
        # created once, because slots are accessed often
        self._views = self.memory.split(sizes)
        pieces = self.memory.split(self._piece_sizes)
        if not pinned and (not touch or len(pieces) == 1):  # there is no work for threads
            if touch:
                _allocate_piece(self._registered, pieces[0], pinned, touch)
            return
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="overspill-allocate")
        try:
            for piece in pieces:
                args = self._registered, piece, pinned, touch
                self._pieces.append(self._threads.submit(_allocate_piece, *args))
            self._threads.shutdown(wait=False)  # the threads end after these pieces
            if not background:
                self.wait_allocated(progress)
        except BaseException:
            self.close()
            raise

    def _new_memory(self) -> Tensor:
        try:
            memory = anonymous_memory(self.nbytes, self._pinned)
        except (OSError, ValueError) as error:
            raise BudgetError(
                f"the host has no {format_size(self.nbytes)} for {self.name}; lower --host-memory "
                f"or give a --disk folder"
            ) from error
        return torch.frombuffer(memory, dtype=torch.uint8)

    def wait_allocated(self, progress: Progress | None = None) -> None:
        """Block until all memory is allocated and, if `pinned`, registered."""
        ends = accumulate(self._piece_sizes)
        for piece, done in zip(self._pieces, ends, strict=False):
            code = piece.result()
            if code != 0:
                raise BudgetError(
                    f"pinning {format_size(self.nbytes)} of host memory for {self.name} failed "
                    f"({code}); lower --host-memory or raise the memlock limit (ulimit -l)"
                )
            if progress is not None:
                progress(f"allocating memory for {self.name}", done, self.nbytes)
        self._join_threads()

    def _join_threads(self) -> None:
        self._pieces = []
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def extend(self, slots: int) -> None:
        """Add slots, in memory of their own."""
        if slots == 0:
            return
        more = HostSlab(self.name, slots, self._slot_bytes, self._pinned)
        self._more.append(more)
        self._views += more._views
        self.nbytes += more.nbytes

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, slot: int) -> Tensor:
        return self._views[slot]

    def close(self) -> None:
        """Unpin and release the memory. It is freed when the last view of it is gone."""
        for piece in self._pieces:
            piece.cancel()
        wait(self._pieces)
        self._join_threads()
        while self._registered:  # Ctrl-C between two calls: the next close() goes on
            _unregister(self._registered[-1])
            self._registered.pop()
        self.memory = self.memory.new_empty(0)
        self._views = ()
        for slab in self._more:
            slab.close()

    def __del__(self) -> None:
        # a slab that nobody could close: Ctrl-C came before it was stored, or during close()
        used = self._registered or self._pieces
        if used and os.getpid() == self._process and not sys.is_finalizing():
            self.close()


def _piece_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """Divide slots into pieces of whole slots: a copy must not span two registrations."""
    pieces: list[int] = []
    for size in sizes:
        if pieces and pieces[-1] + size <= limit:
            pieces[-1] += size
        else:
            pieces.append(size)
    return pieces


def _allocate_piece(addresses: list[int], piece: Tensor, pinned: bool, touch: bool) -> int:
    """Add its address to `addresses` if it was registered. Does not refer to the slab: a thread
    that held the last reference to it would have to wait for itself."""
    if touch:  # the system allocates zeroed pages on the first access
        ctypes.memset(piece.data_ptr(), 0, piece.numel())  # releases the GIL
    if not pinned:
        return 0
    address = piece.data_ptr()
    code = int(torch.cuda.cudart().cudaHostRegister(address, piece.numel(), 0))
    if code == 0:
        registered[address] = piece.numel()
        addresses.append(address)
    return code


def _unregister(address: int) -> None:
    code = int(torch.cuda.cudart().cudaHostUnregister(address))
    if registered.pop(address, None) is not None and code != 0:
        log.warning("host memory could not be unpinned (%s)", code)


def anonymous_memory(size: int, pinned: bool) -> mmap.mmap:
    """Pinned memory uses huge pages where available, because they need fewer address translations.
    Huge pages need private memory; a forked child sees zeros instead of copying all of it. Memory
    that is not pinned is shared with a child."""
    if not pinned or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_WIPE_ON_FORK)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # an old kernel, or one without huge pages
        log.info("no huge pages for pinned memory (%s): CPU access is a little slower", error)
        memory.close()
        return mmap.mmap(-1, size)
    return memory


def device_slab(slots: int, slot_bytes: int, device: torch.device) -> Tensor:
    """Slots on the compute device: one contiguous slab, so adjacent slots form one tensor."""
    return torch.zeros(slots, slot_bytes, dtype=torch.uint8, device=device)
