"""Records on an SSD: one preallocated file a kind, aligned rows, direct I/O."""

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
    """`rows` records of `row_bytes` in one file. Reads and writes may run in many threads."""

    def __init__(self, path: Path, rows: int, row_bytes: int) -> None:
        assert row_bytes % ALIGN == 0
        self.path = path
        self.row_bytes = row_bytes
        self.nbytes = rows * row_bytes
        self.fd = self._open(path)
        # nameless from the start: the space is free again however the process ends
        path.unlink()
        try:
            # the space is taken now, so that a full disk shows here and not in the middle of a step
            os.posix_fallocate(self.fd, 0, max(self.nbytes, 1))
        except OSError as error:
            self.close()
            raise DiskError(
                f"no room for {format_size(self.nbytes)} in {path.parent} ({error.strerror}); "
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
        log.warning(
            "%s: no direct I/O on this file system, reads go through the cache", path.parent
        )
        return os.open(path, flags, 0o600)

    def read(self, row: int, into: Tensor) -> None:
        """Fills the bytes `into` (a slab row) with record `row`."""
        view = memoryview(_buffer(into))
        done = 0
        while done < len(view):
            n = os.preadv(self.fd, [view[done:]], row * self.row_bytes + done)
            if n == 0:
                raise self._cut()
            done += n

    def write(self, row: int, source: Tensor) -> None:
        """Writes the bytes `source` (a slab row) as record `row`."""
        if os.fstat(self.fd).st_size < self.nbytes:
            raise self._cut()  # writing behind the end would fill the rest with zeros
        view = memoryview(_buffer(source))
        done = 0
        while done < len(view):
            done += os.pwritev(self.fd, [view[done:]], row * self.row_bytes + done)

    def _cut(self) -> DiskError:
        size = os.fstat(self.fd).st_size
        return DiskError(
            f"{self.path} has {format_size(size)} of {format_size(self.nbytes)}: it was cut or "
            f"replaced while in use; restart from the last checkpoint"
        )

    def close(self) -> None:
        """Closes the file, and with it gives its space back: it is spill, not a checkpoint."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


DIRECT_FROM = 1 << 20
"""Bytes from which direct reads are worth their rounding to whole blocks."""
_BOUNCE = 8 << 20


class DirectFile:
    """A file of somebody else's, read past the page cache at any place and length: through an
    aligned buffer for each thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._own = threading.local()

    @staticmethod
    def open(path: Path) -> "DirectFile | None":
        """None where the file system has no direct I/O."""
        try:
            return DirectFile(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return None

    def read(self, into: memoryview, at: int) -> int:
        """Fills the beginning of `into` with the file's bytes from `at` on; how many, 0 at the end
        of the file."""
        if not hasattr(self._own, "bounce"):
            self._own.bounce = mmap.mmap(-1, _BOUNCE)  # whole pages, so it is aligned
        bounce: mmap.mmap = self._own.bounce
        skip = at % ALIGN
        length = min(_BOUNCE, round_up(skip + len(into), ALIGN))
        with memoryview(bounce) as buffer:
            count = os.preadv(self._fd, [buffer[:length]], at - skip)
        count = min(max(0, count - skip), len(into))
        if count:
            target = ctypes.addressof(ctypes.c_char.from_buffer(into))
            source = ctypes.addressof(ctypes.c_char.from_buffer(bounce, skip))
            ctypes.memmove(target, source, count)  # without the GIL, unlike a slice of bytes
        return count

    def close(self) -> None:
        os.close(self._fd)


def _buffer(row: Tensor) -> ctypes.Array[ctypes.c_char]:
    assert row.is_contiguous()
    return (ctypes.c_char * row.nbytes).from_address(row.data_ptr())
