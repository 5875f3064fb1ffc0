"""Memory taken once: a slab is one allocation cut into equal rows."""

import ctypes
import logging
import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from overspill.core.errors import BudgetError
from overspill.core.sizes import format_size
from overspill.tiers.layout import ALIGN

log = logging.getLogger("overspill")

Progress = Callable[[str, int, int], None]
"""Called with (what, bytes done, bytes in all) while a long job goes on."""

_PIECE = 256 << 20
_TAKERS = 8
_WIPE_ON_FORK = 18  # Linux' MADV_WIPEONFORK, which Python does not name


class HostSlab:
    """Page-aligned host memory of `rows` x `row_bytes`, pinned for the GPU if `pinned`.

    Anonymous memory registered with CUDA rather than torch's pinned allocator, which rounds up
    to a power of two: 58 GB would become 64. Several threads touch and register it, piece by
    piece: one thread would need half a minute. In the `background` they go on after this returns,
    while rows may be filled already; `settle` waits for them.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        row_bytes: int,
        pinned: bool,
        progress: Progress | None = None,
        background: bool = False,
    ) -> None:
        assert row_bytes % ALIGN == 0
        self.name = name
        self.row_bytes = row_bytes
        self.nbytes = rows * row_bytes
        self._registered: list[int] = []
        self._taking: list[Future[int]] = []
        self._takers: ThreadPoolExecutor | None = None
        # pieces end at row borders: a copy may not span two registrations
        self._rows_a_piece = max(1, _PIECE // row_bytes)
        if rows == 0:
            self.rows = torch.empty(0, row_bytes, dtype=torch.uint8)
            self._views = self.rows.unbind()
            return
        try:
            memory = _anonymous(self.nbytes, pinned)
        except (OSError, ValueError) as error:
            raise BudgetError(
                f"the host has no {format_size(self.nbytes)} for {name}; lower --host-memory or "
                f"give a --disk folder"
            ) from error
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        self.rows = flat.view(rows, row_bytes)
        self._views = self.rows.unbind()  # made once: rows are asked for all the time
        self._takers = ThreadPoolExecutor(_TAKERS, thread_name_prefix="overspill-take")
        self._taking = [
            self._takers.submit(self._take_piece, piece, pinned, not background)
            for piece in self.rows.split(self._rows_a_piece)
        ]
        self._takers.shutdown(wait=False)  # once they have done this
        if not background:
            self.settle(progress)

    def settle(self, progress: Progress | None = None) -> None:
        """Waits until all of it is taken."""
        size = self._rows_a_piece * self.row_bytes
        for number, taking in enumerate(self._taking, start=1):
            self._await(taking)
            if progress is not None:
                done = min(number * size, self.nbytes)
                progress(f"taking memory for {self.name}", done, self.nbytes)
        self._see_takers_off()

    def _see_takers_off(self) -> None:
        """Their work is done; they may still be about to end."""
        self._taking = []
        if self._takers is not None:
            self._takers.shutdown()
            self._takers = None

    def _await(self, taking: "Future[int]") -> None:
        code = taking.result()
        if code != 0:
            self.close()
            raise BudgetError(
                f"pinning {format_size(self.nbytes)} of host memory for {self.name} failed "
                f"({code}); lower --host-memory or raise the memlock limit (ulimit -l)"
            )

    def _take_piece(self, piece: Tensor, pinned: bool, touch: bool) -> int:
        if touch:  # it is zero already, but not there yet
            ctypes.memset(piece.data_ptr(), 0, piece.numel())  # without the GIL
        if not pinned:
            return 0
        code = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
        if code == 0:
            self._registered.append(piece.data_ptr())
        return code

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Tensor:
        return self._views[row]

    def close(self) -> None:
        """Unpins the memory and lets it go; the bytes live as long as something views them."""
        for taking in self._taking:
            taking.cancel()
        wait(self._taking)
        self._see_takers_off()
        for pointer in self._registered:
            torch.cuda.cudart().cudaHostUnregister(pointer)
        self._registered.clear()
        self.rows = self.rows.new_empty(0, self.row_bytes)
        self._views = ()


def _anonymous(size: int, pinned: bool) -> mmap.mmap:
    """Pinned memory comes in huge pages where the system gives some: smaller ones take the cores
    longer to find. Such memory is private, so a forked child gets zeros in its place, or all of it
    would be copied. What is not pinned is shared with a child."""
    if not pinned or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(_WIPE_ON_FORK)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # an old kernel, or one without huge pages
        log.info("no huge pages for pinned memory (%s): the cores read it a little slower", error)
        memory.close()
        return mmap.mmap(-1, size)
    return memory


def device_slab(rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """Slots on the compute device: one contiguous slab, so neighbouring slots form one tensor."""
    return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)
