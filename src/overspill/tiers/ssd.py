"""Records on an SSD: preallocated files with aligned slots, accessed by direct I/O."""

import ctypes
import errno
import logging
import mmap
import os
import threading
from pathlib import Path

from torch import Tensor

from overspill.core.errors import DiskError
from overspill.core.sizes import format_size, round_up
from overspill.tiers.layout import ALIGN

log = logging.getLogger("overspill")


def check_folder(folder: Path, need: int) -> None:
    """Raises DiskError if `folder` cannot be written or has less than `need` bytes free."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise DiskError(
            f"the disk folder {folder} is not writable ({error.strerror}); give --disk a folder "
            f"you may write to"
        ) from error
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < need:
        raise DiskError(
            f"the disk folder {folder} has {format_size(free)} free, the spilled experts need "
            f"{format_size(need)}; free some space, raise --host-memory or choose another --disk"
        )


class RecordFile:
    """One file of `slots` records of `slot_bytes`. Several threads can read and write it."""

    def __init__(self, path: Path, slots: int, slot_bytes: int) -> None:
        assert slot_bytes % ALIGN == 0
        self.path = path
        self.slot_bytes = slot_bytes
        self.nbytes = slots * slot_bytes
        self.fd = self._open(path)
        # without a name, the file is deleted however the process ends
        path.unlink()
        try:
            # reserves the space now, so that a full disk is found here and not during a step
            os.posix_fallocate(self.fd, 0, max(self.nbytes, 1))
        except OSError as error:
            self.close()
            raise DiskError(
                f"{path.parent} has no {format_size(self.nbytes)} free ({error.strerror}); "
                f"free some space or choose another --disk"
            ) from error

    @staticmethod
    def _open(path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise DiskError(f"cannot create {path} ({error.strerror})") from error
        log.warning("%s: no direct I/O on this file system; using the page cache", path.parent)
        return os.open(path, flags, 0o600)

    def read(self, slot: int, into: Tensor) -> None:
        """Reads record `slot` into the bytes `into`, a slot of a slab."""
        view = memoryview(_buffer(into))
        done = 0
        while done < len(view):
            n = os.preadv(self.fd, [view[done:]], slot * self.slot_bytes + done)
            if n == 0:
                raise self._truncated()
            done += n

    def write(self, slot: int, source: Tensor) -> None:
        """Writes the bytes `source`, a slot of a slab, as record `slot`."""
        if os.fstat(self.fd).st_size < self.nbytes:
            raise self._truncated()  # a write past the end would fill the gap with zeros
        view = memoryview(_buffer(source))
        done = 0
        while done < len(view):
            done += os.pwritev(self.fd, [view[done:]], slot * self.slot_bytes + done)

    def _truncated(self) -> DiskError:
        size = os.fstat(self.fd).st_size
        return DiskError(
            f"{self.path} has {format_size(size)} of {format_size(self.nbytes)}: it was "
            f"truncated or replaced while in use; restart from the last checkpoint"
        )

    def close(self) -> None:
        """Closes the file, which frees its disk space."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


DIRECT_FROM = 1 << 20
"""Size in bytes from which a direct read is faster although it reads whole blocks."""
_BOUNCE = 8 << 20


class DirectFile:
    """Reads a file of any layout without the page cache, at any offset and length, through one
    aligned buffer per thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._local = threading.local()

    @staticmethod
    def open(path: Path) -> "DirectFile | None":
        """None if the file system has no direct I/O."""
        try:
            return DirectFile(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return None

    def read(self, into: memoryview, at: int) -> int:
        """Reads from offset `at` into the start of `into`. Returns the number of bytes, 0 at the
        end of the file."""
        if not hasattr(self._local, "bounce"):
            self._local.bounce = mmap.mmap(-1, _BOUNCE)  # mmap aligns to pages
        bounce: mmap.mmap = self._local.bounce
        skip = at % ALIGN
        length = min(_BOUNCE, round_up(skip + len(into), ALIGN))
        with memoryview(bounce) as buffer:
            count = os.preadv(self._fd, [buffer[:length]], at - skip)
        count = min(max(0, count - skip), len(into))
        if count:
            target = ctypes.addressof(ctypes.c_char.from_buffer(into))
            source = ctypes.addressof(ctypes.c_char.from_buffer(bounce, skip))
            ctypes.memmove(target, source, count)  # releases the GIL, unlike slicing
        return count

    def close(self) -> None:
        os.close(self._fd)


def _buffer(slot: Tensor) -> ctypes.Array[ctypes.c_char]:
    assert slot.is_contiguous()
    return (ctypes.c_char * slot.nbytes).from_address(slot.data_ptr())
