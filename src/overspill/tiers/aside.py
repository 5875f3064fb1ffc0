"""Folders written atomically: filled under a temporary name, synced, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_aside(target: Path) -> Iterator[Path]:
    """Yields a new folder next to `target`; syncs it and renames it to `target` at the end.

    `target` must not exist or must be an empty folder. After an error the new folder is removed.
    A folder left by a killed process is removed by the next call with the same target.
    """
    target = target.absolute()  # "." has no name
    with temporary_folder(target.parent / f".tmp-{target.name}") as aside:
        yield aside
        sync_all(aside)
        os.rename(aside, target)
        sync(target.parent)


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yields a new folder and removes it at the end, unless it was renamed. Content left there by a
    killed process is removed first."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sync_all(folder: Path) -> None:
    """Syncs a folder and everything in it to the disk."""
    for inner, _, files in os.walk(folder):
        for name in files:
            sync(Path(inner, name))
        sync(Path(inner))


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
