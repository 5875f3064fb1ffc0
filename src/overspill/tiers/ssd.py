"""Records on an SSD: preallocated files with aligned slots, accessed by direct I/O."""

import ctypes
import errno
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from torch import Tensor

from overspill.core.errors import DiskError
from overspill.core.sizes import format_size, round_up
from overspill.tiers.layout import ALIGN

log = logging.getLogger("overspill")

PRESENT, ARRIVING = -1, -2  # instead of an offset in a file, as in cpu_misses.h


def check_folder(folder: Path, need: int) -> None:
    """Raise DiskError if `folder` cannot be written or has less than `need` bytes free. Creates it,
    but not its parents: that of a disk which is not mounted would be on another one."""
    if not folder.exists() and not folder.absolute().parent.exists():
        raise DiskError(
            f"the disk folder {folder} cannot be created: {folder.absolute().parent} does not "
            "exist; create it, or mount the SSD there, or give another --disk"
        )
    try:
        if not folder.exists():
            folder.mkdir(exist_ok=True)  # another rank may create it too
            log.warning("created the folder %s for experts on disk", folder)
        # a file that is new and has a random name: others may write to a shared folder too
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"x")
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


def reserve(fd: int, size: int) -> bool:
    """Give a file its size and reserve the space now, so that a full disk is found here and not
    during a step. False if the file system cannot reserve space."""
    try:
        os.posix_fallocate(fd, 0, max(size, 1))
        return True
    except OSError as error:
        # EINVAL: the C library writes single bytes instead, which direct I/O does not allow
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
    os.ftruncate(fd, size)
    return False


class RecordFile:
    """One file of `slots` records of `slot_bytes`, or of `sizes`. Several threads can read and
    write it."""

    def __init__(
        self, path: Path, slots: int, slot_bytes: int, sizes: Sequence[int] | None = None
    ) -> None:
        self.path = path
        self.nbytes = slots * slot_bytes
        self.offsets: Sequence[int] = range(0, self.nbytes, slot_bytes)
        """The position of each record in the file."""
        if sizes is not None:
            *self.offsets, self.nbytes = accumulate(sizes, initial=0)
        assert all(size % ALIGN == 0 for size in (slot_bytes, *(sizes or ())))
        self.fd = self._open(path)
        try:
            # without a name, the file is deleted however the process ends
            path.unlink()
            self._reserve()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _open(path: Path) -> int:
        """Create the file; never opens one that is there, nor the target of a link."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            path.unlink(missing_ok=True)  # some file systems create it and then refuse
            log.warning("%s: no direct I/O on this file system; using the page cache", path.parent)
            return os.open(path, flags, 0o600)
        except OSError as error:
            raise DiskError(f"cannot create {path} ({error.strerror})") from error

    def _reserve(self) -> None:
        try:
            reserved = reserve(self.fd, self.nbytes)
        except OSError as error:
            raise self._error("reserving", self.nbytes, error) from error
        if not reserved:
            log.warning(
                "%s: this file system cannot reserve space; keep %s free while the model is in use",
                self.path.parent,
                format_size(self.nbytes),
            )

    def read(self, slot: int, into: Tensor) -> None:
        """Read record `slot` into the bytes `into`, a slot of a slab."""
        view = memoryview(_buffer(into))
        done = 0
        while done < len(view):
            try:
                n = os.preadv(self.fd, [view[done:]], self.offsets[slot] + done)
            except OSError as error:
                raise self._error("reading", len(view), error) from error
            if n == 0:
                raise self._truncated()
            done += n

    def write(self, slot: int, source: Tensor) -> None:
        """Write the bytes `source`, a slot of a slab, as record `slot`."""
        if os.fstat(self.fd).st_size < self.nbytes:
            raise self._truncated()  # a write past the end would fill the gap with zeros
        view = memoryview(_buffer(source))
        done = 0
        while done < len(view):
            try:
                done += os.pwritev(self.fd, [view[done:]], self.offsets[slot] + done)
            except OSError as error:
                raise self._error("writing", len(view), error) from error

    def read_error(self, number: int, size: int) -> DiskError:
        """The error of a native thread that could not read a record of this size: `number` is an
        `errno`, or -1 for the end of the file."""
        if number < 0:
            return self._truncated()
        return self._error("reading", size, OSError(number, os.strerror(number)))

    def _error(self, doing: str, size: int, error: OSError) -> DiskError:
        advice = "check the disk or choose another --disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            advice = "free some space, raise --host-memory or choose another --disk"
        return DiskError(
            f"{self.path}: {doing} {format_size(size)} of experts failed "
            f"({error.strerror}); {advice}"
        )

    def _truncated(self) -> DiskError:
        size = os.fstat(self.fd).st_size
        return DiskError(
            f"{self.path} has {format_size(size)} of {format_size(self.nbytes)}: it was "
            f"truncated or replaced while in use; load the model again, or restart from the last "
            f"checkpoint"
        )

    def close(self) -> None:
        """Close the file, which frees its disk space."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


DIRECT_FROM = 1 << 20
"""Size in bytes from which a direct read is faster although it reads whole blocks."""
_BOUNCE = 8 << 20


class BounceBuffers(threading.local):
    """One aligned buffer for each thread, for any number of direct files."""

    def __init__(self, size: int = _BOUNCE) -> None:  # called in each thread
        self.buffer = mmap.mmap(-1, size)  # mmap aligns to pages


class DirectFile:
    """Reads a file of any layout without the page cache, at any offset and length, through the
    aligned buffer of the thread."""

    def __init__(self, fd: int, bounce: BounceBuffers) -> None:
        self._fd = fd
        self._bounce = bounce

    @staticmethod
    def open(path: Path, bounce: BounceBuffers) -> "DirectFile | None":
        """None if the file system has no direct I/O."""
        try:
            return DirectFile(os.open(path, os.O_RDONLY | os.O_DIRECT), bounce)
        except OSError:
            return None

    def read(self, into: memoryview, at: int) -> int:
        """Read from offset `at` into the start of `into`. Returns the number of bytes, 0 at the end
        of the file."""
        bounce = self._bounce.buffer
        skip = at % ALIGN
        length = min(len(bounce), round_up(skip + len(into), ALIGN))
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
