"""The argument MODEL, and completion of arguments by the shell.

The shell runs these functions at each press of Tab: they read a few folders, and import nothing.
"""

import os
from collections.abc import Iterator
from typing import Annotated

import typer

_RUNS = "runs"
_INSIDE = ("final", "best")
"""Folders of a fine-tuning with a checkpoint each."""
_MOST_ENTRIES = 1000


def complete_model(incomplete: str) -> list[str]:
    """Folders with a model that begin so. With none the shell completes any path, as for a file."""
    beside = [path for path in _folders(os.path.dirname(incomplete)) if path.startswith(incomplete)]
    runs = [] if os.path.dirname(incomplete) else _folders(_RUNS)
    found = {model for folder in (*beside, *runs) for model in _models(folder)}
    return sorted(model for model in found if model.startswith(incomplete))


def complete_preset(incomplete: str) -> list[str]:
    """Presets that begin so; config files are completed by the shell."""
    from overspill.models.presets import PRESETS  # loads no torch, and is not needed to run

    return [name for name in PRESETS if name.startswith(incomplete)]


def _models(folder: str) -> Iterator[str]:
    for path in (folder, *(os.path.join(folder, name) for name in _INSIDE)):
        if _is_model(path):
            yield path


def _is_model(path: str) -> bool:
    """Whether it is the folder of a run of `overspill train` or a checkpoint of Hugging Face."""
    if not os.path.isfile(os.path.join(path, "config.json")):
        return False
    if os.path.isdir(os.path.join(path, "checkpoints")):
        return not any(os.path.isdir(os.path.join(path, name)) for name in _INSIDE)
    with os.scandir(path) as entries:
        return any(entry.name.endswith(".safetensors") for entry in entries)


def _folders(parent: str) -> list[str]:
    """The folders in a folder, hidden ones not; none if it cannot be read."""
    try:
        with os.scandir(parent or ".") as entries:
            names = [
                entry.name
                for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False)
                if not entry.name.startswith(".") and entry.is_dir()
            ]
    except OSError:
        return []
    return [os.path.join(parent, name) for name in names]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The folder of a Hugging Face checkpoint, a repository of the hub, or the folder of "
        "a run of overspill train.",
        autocompletion=complete_model,
    ),
]
