"""Folders written atomically: filled under a temporary name, synced, then renamed."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overspill.core.errors import ConfigError, DiskError
from overspill.core.sizes import format_size
from overspill.hardware.machine import disk_free


def check_new(out: Path) -> None:
    """Raise if the argument OUT of a command is not the name of a new folder."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"OUT {out} already exists; give the name of a new folder")
    if out.is_mount():  # it cannot be replaced by a complete folder
        raise ConfigError(f"OUT {out} is the root of a disk; give the name of a new folder in it")


@contextmanager
def new_folder(out: Path, need: int = 0) -> Iterator[Path]:
    """`folder_aside` for the argument OUT of a command, which errors name. Raises if the disk has
    not the `need` bytes that will be written."""
    check_new(out)
    if need > (free := disk_free(out)):
        raise DiskError(
            f"OUT {out}: the checkpoint needs {format_size(need)}, the disk has "
            f"{format_size(free)} free; free some space or give another folder"
        )
    try:
        with folder_aside(out) as folder:
            yield folder
    except Exception as error:
        cause = error.__cause__ if isinstance(error, DiskError) and error.__cause__ else error
        reason = write_failure(cause) if isinstance(cause, Exception) else None
        if reason is None:
            raise
        raise DiskError(
            f"OUT {out} cannot be written ({reason}); free some space or give another folder; no "
            "files were left there"
        ) from error


@contextmanager
def folder_aside(target: Path) -> Iterator[Path]:
    """Yield a new folder next to `target`; sync it and rename it to `target` at the end.

    `target` must not exist, or be an empty folder or a link to one. After an error the new folder
    is removed. A folder left by a killed process is removed by the next call with the same target.
    """
    target = Path(os.path.realpath(target))  # "." has no name, and a folder cannot replace a link
    with temporary_folder(target.parent / f".tmp-{target.name}") as aside:
        yield aside
        sync_all(aside)
        os.rename(aside, target)
        sync(target.parent)


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder and remove it at the end, unless it was renamed. Content left there by a
    killed process is removed first; raises if another process has the folder."""
    if os.path.lexists(path):
        leftover = _lock(path)
        remove(path)
        os.close(leftover)
    path.mkdir(parents=True)
    lock = _lock(path)
    try:
        yield path
    finally:
        if _is_open_as(path, lock):  # else it was renamed, and the name may be another process's
            remove(path)
        os.close(lock)


def _lock(path: Path) -> int:
    """A descriptor that keeps other processes from the folder until it is closed, or until this
    process ends."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = _is_open_as(path, fd)  # else another process has removed the folder meanwhile
    except BlockingIOError:
        free = False
    except OSError:
        free = True  # this file system has no locks for folders
    if not free:
        os.close(fd)
        raise ConfigError(
            f"{path} is being written by another process; wait for it, or give another folder"
        )
    return fd


def _is_open_as(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def remove(path: Path) -> None:
    """Remove a folder as far as possible. Of a link, only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def write_failure(error: Exception) -> str | None:
    """The reason why the system did not write a file; None if the error has another cause.
    safetensors and tokenizers, which are in Rust, raise errors of their own types then."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = re.search(r"\(os error (\d+)\)", str(error))
    return None if number is None else os.strerror(int(number[1]))


def sync_all(folder: Path) -> None:
    """Sync a folder and everything in it to the disk."""
    for inner, _, files in os.walk(folder):
        for name in files:
            sync(Path(inner, name))
        sync(Path(inner))


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
