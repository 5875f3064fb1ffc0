"""Reads the pre-gates of a checkpoint, checks that they fit its conventional model, and adds
them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.models.huggingface.dictionaries import cast_routers
from overspill.models.huggingface.pregate_file import (
    CONVENTIONAL,
    FILE,
    OWN,
    SAMPLE,
    gate_tensors,
    has_pregates,
    other_tensors,
    read_file,
    refused,
    sample,
)
from overspill.models.pregate import check_level, find_chains, pregate


@dataclass(frozen=True)
class SavedPregates:
    """Pre-gates of a file that fits a model."""

    level: int
    tensors: dict[str, Tensor]

    def add_to(self, model: nn.Module) -> None:
        """Give a conventional model its pre-gates."""
        pregate(model, self.level)
        self._copy_to(model)
        cast_routers(model)
        self._copy_to(model)  # without rounding to the data type of the checkpoint

    @torch.no_grad()
    def _copy_to(self, model: nn.Module) -> None:
        for name, tensor in gate_tensors(model).items():
            tensor.copy_(self.tensors[name])


def read_pregates(folder: Path, model: Any) -> SavedPregates | None:
    """Return the pre-gates in a folder whose conventional model is `model`; None if there are
    none."""
    path = folder / FILE
    if not has_pregates(folder):
        return None
    facts, tensors = read_file(path)
    samples = {
        name.removeprefix(SAMPLE): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(SAMPLE)
    }
    if (kind := facts.get("model_type")) != model.config.model_type:
        raise refused(path, f"it is of a {kind}, the checkpoint is a {model.config.model_type}")
    level = int(facts["level"])
    chains = find_chains(model)
    try:
        check_level(level, chains)
    except ConfigError as error:
        raise refused(path, str(error)) from error
    there = {
        f"{block.path}.{name}.{key}": tensor
        for chain in chains
        for block in chain[level:]
        for name, module in block.block.named_children()
        if module is block.gate
        for key, tensor in module.state_dict().items()
    }
    expected = {start + name for start in (OWN, CONVENTIONAL) for name in there}
    for name in sorted(expected ^ tensors.keys()):
        raise refused(path, f"{name} is only in the {'file' if name in tensors else 'model'}")
    for name, tensor in there.items():
        for start in (OWN, CONVENTIONAL):
            shape = tensors[start + name].shape
            if shape != tensor.shape:
                raise refused(
                    path, f"{start}{name} has shape {list(shape)}, the model {list(tensor.shape)}"
                )
        conventional = tensors[CONVENTIONAL + name]
        if not tensor.is_meta and not _equal(conventional, tensor.detach().cpu()):
            raise refused(path, f"it was saved with another {name} than that of the checkpoint")
    for name, tensor in other_tensors(model).items():
        known = samples.get(name)
        if known is None or tensor.is_meta:
            continue
        if not _equal(known, sample(tensor)):
            raise refused(path, f"it was saved with another {name} than that of the checkpoint")
    own = {name: tensors[OWN + name] for name in there}
    return SavedPregates(level, own)


def _equal(saved: Tensor, loaded: Tensor) -> bool:
    """Return whether tensors are equal in the smaller of their types: that of the model may have
    been another one when they were saved. NaN equals NaN."""
    if saved.dtype.itemsize < loaded.dtype.itemsize:
        loaded = loaded.to(saved.dtype)
    saved = saved.to(loaded.dtype)
    return (
        saved.shape == loaded.shape
        and torch.equal(saved.isnan(), loaded.isnan())
        and bool(((saved == loaded) | saved.isnan()).all())
    )
