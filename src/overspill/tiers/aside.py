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
    aside = target.parent / f".tmp-{target.name}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for folder, _, files in os.walk(aside):
            for name in files:
                sync(Path(folder, name))
            sync(Path(folder))
        os.rename(aside, target)
        sync(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
