"""Host memory that several processes map.

It is a memfd: a file without a name, which is not limited by the size of /dev/shm and is gone when
the last process that uses it has ended, also by SIGKILL. Its pages are small unless they are
collapsed to huge pages, which needs an aligned mapping.
"""

import ctypes
import errno
import logging
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from overspill.core.errors import BudgetError
from overspill.core.sizes import format_size, round_up

HUGE_PAGE = 2 << 20
_POPULATE_WRITE, _COLLAPSE = 23, 25  # of madvise; the mmap module does not define them
_FIXED = 0x10
_PIECE_BYTES = 256 << 20
_THREADS = 8
_log = logging.getLogger("overspill")


class SharedMemory:
    """New memory, filled with zeros, that other processes can map."""

    def __init__(self, size: int, populated: int) -> None:
        """The first bytes of it, `populated`, are allocated now, the others when they are used."""
        try:
            self.file = os.memfd_create("overspill")
        except OSError as error:
            raise _refused(size, error) from error
        try:
            os.ftruncate(self.file, size)
            self.bytes = map_file(self.file, size)
            _populate(self.bytes[:populated])
        except BaseException as error:
            os.close(self.file)
            if isinstance(error, OSError):
                raise _refused(size, error) from error
            raise

    def close_file(self) -> None:
        """The mapping stays until the last view of `bytes` is gone. A child does not inherit the
        file."""
        os.close(self.file)


def map_file(file: int, size: int) -> Tensor:
    """The memory behind a memfd of another process, which may be closed then."""
    try:
        return _map(file, size)
    except OSError as error:
        raise _refused(size, error) from error


def _refused(size: int, error: OSError) -> BudgetError:
    return BudgetError(
        f"the system refused {format_size(size)} of host memory that ranks share (memfd): {error}; "
        'lower --host-memory, or use Settings(placement="static"), which shares none'
    )


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def _map(file: int, size: int) -> Tensor:
    """Map a file at a multiple of the size of a huge page."""
    libc, length = _libc(), round_up(size, mmap.PAGESIZE)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = _checked(libc.mmap(None, length + HUGE_PAGE, 0, private, -1, 0))
    address = round_up(start, HUGE_PAGE)
    try:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        _checked(libc.mmap(address, length, access, mmap.MAP_SHARED | _FIXED, file, 0))
    except OSError:
        libc.munmap(start, length + HUGE_PAGE)
        raise
    end = start + length + HUGE_PAGE
    for first, last in ((start, address), (address + length, end)):
        if last > first:
            libc.munmap(first, last - first)
    memory = (ctypes.c_uint8 * size).from_address(address)
    # not at exit: threads may still use it, and the system unmaps it then
    weakref.finalize(memory, libc.munmap, address, length).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def _populate(memory: Tensor) -> None:
    """Allocate the pages of shared memory and make them huge where possible, before they are
    pinned. Raises OSError if the system has none left."""
    pieces = memory.split(_PIECE_BYTES)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="overspill-allocate") as threads:
        codes = list(threads.map(_populate_piece, pieces))
    failed = [code for code in codes if code != 0]
    if failed:
        raise OSError(failed[0], os.strerror(failed[0]))


def _populate_piece(memory: Tensor) -> int:
    libc, start, end = _libc(), memory.data_ptr(), memory.data_ptr() + memory.nbytes
    if libc.madvise(start, end - start, _POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # an old kernel allocates pages on the first access
            return code
    huge = end // HUGE_PAGE * HUGE_PAGE - start
    if huge > 0 and libc.madvise(start, huge, _COLLAPSE) != 0:
        reason = os.strerror(ctypes.get_errno())
        _log.info("no huge pages for shared memory (%s): access is a little slower", reason)
    return 0
