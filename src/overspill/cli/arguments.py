"""The argument MODEL, and completion of arguments by the shell.

The shell runs these functions at each press of Tab: they read a few folders, and import nothing.
"""

import os
from typing import Annotated

import typer

_RUNS = "runs"
_MOST_ENTRIES = 1000
_GGUF = ".gguf"


def complete_model(incomplete: str) -> list[str]:
    """Folders with a model and GGUF files whose paths begin with `incomplete`. Without any the
    shell completes paths, as for a file."""
    parent = os.path.dirname(incomplete)
    found = set(_folders(parent)) | set([] if parent else _folders(_RUNS))
    return sorted(path for path in found if path.startswith(incomplete) and _is_model(path))


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets that begin with `incomplete`; config files are completed by the shell."""
    from overspill.models.presets import PRESETS  # loads no torch, and is not needed to run

    return [name for name in PRESETS if name.startswith(incomplete)]


def complete_checkpoint_preset(incomplete: str) -> list[str]:
    """Names of presets of `overspill create` that begin with `incomplete`."""
    from overspill.models.checkpoint_presets import summaries  # loads no torch

    return [row.name for row in summaries() if row.name.startswith(incomplete)]


def _is_model(path: str) -> bool:
    """Whether `path` is a GGUF file, or the folder of a GGUF file, a run, a checkpoint of Hugging
    Face or a LoRA adapter."""
    if path.endswith(_GGUF):
        return True
    try:
        names = set(os.listdir(path))
    except OSError:
        return False
    has_weights = any(name.endswith(".safetensors") for name in names)
    is_checkpoint = "config.json" in names and ("checkpoints" in names or has_weights)
    has_gguf = any(name.endswith(_GGUF) for name in names)
    return is_checkpoint or has_gguf or "adapter_config.json" in names


def _folders(parent: str) -> list[str]:
    """The folders and GGUF files in a folder, except hidden ones; none if it cannot be read."""
    try:
        with os.scandir(parent or ".") as entries:
            names = [
                entry.name
                for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False)
                if not entry.name.startswith(".") and (entry.is_dir() or entry.name.endswith(_GGUF))
            ]
    except OSError:
        return []
    return [os.path.join(parent, name) for name in names]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The folder of a Hugging Face checkpoint or of a LoRA adapter, a GGUF file, a "
        "repository of the hub, or the folder of a run of overspill train or finetune.",
        autocompletion=complete_model,
    ),
]
