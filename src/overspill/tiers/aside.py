"""Folders that are there as a whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_aside(target: Path) -> Iterator[Path]:
    """A new folder beside `target` to fill; it is forced to the disk and gets its name at the end.

    `target` must not be there yet, or be an empty folder. After an error nothing is left; what a
    killed process leaves, the next one for the same target removes.
    """
    target = target.absolute()  # "." has no name
    with temporary_folder(target.parent / f".tmp-{target.name}") as aside:
        yield aside
        sync_all(aside)
        os.rename(aside, target)
        sync(target.parent)


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A new folder that is gone at the end, unless it has another name by then. What a killed
    process left there is removed."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sync_all(folder: Path) -> None:
    """Force all that is in a folder to the disk."""
    for inner, _, files in os.walk(folder):
        for name in files:
            sync(Path(inner, name))
        sync(Path(inner))


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
