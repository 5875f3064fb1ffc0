"""`pregates.safetensors`: the pre-gates of a model, beside its checkpoint.

The checkpoint itself has the conventional gates, so that transformers loads the conventional model.
The file has both, and some numbers of each other tensor: by them a file of another model, or of
another training of it, is recognised.
"""

import functools
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.adapt import experts_paths
from overspill.models.huggingface.dictionaries import cast_routers
from overspill.models.pregate import check_level, find_chains, pregate, pregate_level
from overspill.moe.pregate import positions, subclass
from overspill.tiers.aside import sync

FILE = "pregates.safetensors"
_FORMAT, _WITHOUT_SAMPLES = "overspill-pregates-2", "overspill-pregates-1"
_OWN, _CONVENTIONAL, _SAMPLE = "pregate.", "gate.", "sample."
_SAMPLES = 1024
"""Numbers of a tensor at most."""


@dataclass(frozen=True)
class SavedPregates:
    """The content of the file, found to fit a model."""

    level: int
    tensors: dict[str, Tensor]

    def add_to(self, model: nn.Module) -> None:
        """Gives a conventional model its pre-gates."""
        pregate(model, self.level)
        self._copy_to(model)
        cast_routers(model)
        self._copy_to(model)  # without rounding to the data type of the checkpoint

    @torch.no_grad()
    def _copy_to(self, model: nn.Module) -> None:
        for name, tensor in gate_tensors(model).items():
            tensor.copy_(self.tensors[name])


def gate_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the pre-gates, with their names in the model's state dict."""
    return {
        f"{path}.{name}": tensor
        for path, gate, position in positions(model)
        if position.is_pregate
        for name, tensor in gate.state_dict().items()
    }


def conventional_gates(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that the pre-gates have replaced."""
    return {
        f"{path}.{name}": tensor
        for path, _, position in positions(model)
        for name, tensor in position.conventional.items()
    }


# -- saving --------------------------------------------------------------------------------------


def save_with_pregates(model: Any) -> None:
    """Makes `model.save_pretrained` write the conventional model, and the pre-gates beside it."""
    kind: Any = type(model)  # mypy does not accept a type as hashable
    model.__class__ = _saving(kind)


@functools.cache
def _saving(kind: type[Any]) -> type[Any]:
    plain: Any = kind.save_pretrained

    @functools.wraps(plain)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = inspect.signature(plain).bind(self, *args, **kwargs).arguments
        if asked.get("push_to_hub"):
            raise ConfigError(
                "save_pretrained(push_to_hub=True) is not supported for a model with pre-gates; "
                "save it and upload the folder"
            )
        state: Any = asked.pop("state_dict", None)
        state = dict(self.state_dict() if state is None else state)
        names, writes = gate_tensors(self), asked.get("is_main_process", True)
        missing = sorted(names.keys() - state.keys())
        if missing and writes:
            raise ConfigError(
                f"save_pretrained(state_dict=...) lacks {missing[0]}, which belongs to a pre-gate; "
                "give the whole state dict of the model, or none"
            )
        own = {name: state[name] for name in names if name in state}
        samples = {name: sample(state[name]) for name in _others(self) if name in state}
        others = asked.pop("kwargs", {})
        plain(**asked, **others, state_dict=state | conventional_gates(self))
        if writes:
            _write(Path(asked["save_directory"]), self, own, samples)

    return subclass(kind, {"save_pretrained": save_pretrained}, kind.__module__)


def _others(model: nn.Module) -> dict[str, Tensor]:
    """The parameters outside of gates and experts."""
    gates = {id(p) for _, gate, _ in positions(model) for p in gate.parameters()}
    experts = tuple(f"{path}." for path in experts_paths(model))
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in gates and not name.startswith(experts)
    }


@torch.no_grad()
def sample(tensor: Tensor) -> Tensor:
    """Numbers from everywhere in a tensor: training changes few of them in bf16."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    return flat[::step][:_SAMPLES].cpu()


def _write(folder: Path, model: Any, own: dict[str, Tensor], samples: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    gates = conventional_gates(model)
    tensors = {_OWN + name: tensor for name, tensor in own.items()}
    tensors |= {_CONVENTIONAL + name: tensor for name, tensor in gates.items()}
    tensors |= {_SAMPLE + name: tensor for name, tensor in samples.items()}
    facts = {
        "format": _FORMAT,
        "level": str(pregate_level(model)),
        "model_type": model.config.model_type,
    }
    part = folder / f"{FILE}.part"
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, part, facts)
    os.replace(part, folder / FILE)
    sync(folder)


# -- loading -------------------------------------------------------------------------------------


def read_pregates(folder: Path, model: Any) -> SavedPregates | None:
    """The pre-gates in a folder whose conventional model is `model`; None if there are none."""
    path = folder / FILE
    if not os.path.lexists(path):  # a link to nothing is refused below
        return None
    facts, tensors = _read(path)
    samples = {
        name.removeprefix(_SAMPLE): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(_SAMPLE)
    }
    if (kind := facts.get("model_type")) != model.config.model_type:
        raise _refused(path, f"it is of a {kind}, the checkpoint is a {model.config.model_type}")
    level = int(facts["level"])
    chains = find_chains(model)
    try:
        check_level(level, chains)
    except ConfigError as error:
        raise _refused(path, str(error)) from error
    there = {
        f"{block.path}.{name}.{key}": tensor
        for chain in chains
        for block in chain[level:]
        for name, module in block.block.named_children()
        if module is block.gate
        for key, tensor in module.state_dict().items()
    }
    expected = {start + name for start in (_OWN, _CONVENTIONAL) for name in there}
    for name in sorted(expected ^ tensors.keys()):
        raise _refused(path, f"{name} is only in the {'file' if name in tensors else 'model'}")
    for name, tensor in there.items():
        for start in (_OWN, _CONVENTIONAL):
            shape = tensors[start + name].shape
            if shape != tensor.shape:
                raise _refused(
                    path, f"{start}{name} has shape {list(shape)}, the model {list(tensor.shape)}"
                )
        conventional = tensors[_CONVENTIONAL + name]
        if not tensor.is_meta and not _equal(conventional, tensor.detach().cpu()):
            raise _refused(path, f"it was saved with another {name} than that of the checkpoint")
    for name, tensor in _others(model).items():
        known = samples.get(name)
        if known is None or tensor.is_meta:
            continue
        if not _equal(known, sample(tensor)):
            raise _refused(path, f"it was saved with another {name} than that of the checkpoint")
    own = {name: tensors[_OWN + name] for name in there}
    return SavedPregates(level, own)


def _equal(saved: Tensor, loaded: Tensor) -> bool:
    """After loading, which may change the type. NaN equals NaN."""
    saved = saved.to(loaded.dtype)
    return (
        saved.shape == loaded.shape
        and torch.equal(saved.isnan(), loaded.isnan())
        and bool(((saved == loaded) | saved.isnan()).all())
    )


def saved_gates(folder: Path) -> set[str]:
    """The names of the gates in a folder that pre-gates replace."""
    path = folder / FILE
    if not os.path.lexists(path):
        return set()
    _, tensors = _read(path)
    return {n.removeprefix(_CONVENTIONAL) for n in tensors if n.startswith(_CONVENTIONAL)}


def copy_pregates(folder: Path, out: Path, samples: dict[str, Tensor]) -> None:
    """Copies the file to the folder of a model in which other tensors have changed: `samples` are
    theirs."""
    from safetensors.torch import save_file

    path = folder / FILE
    if not os.path.lexists(path):
        return
    facts, tensors = _read(path)
    known = {_SAMPLE + name: tensor for name, tensor in samples.items()}
    changed = {name: known.get(name, tensor) for name, tensor in tensors.items()}
    save_file(changed, out / FILE, facts)


def saved_level(folder: Path) -> int | None:
    """The level of the pre-gates in a folder; None if there are none."""
    path = folder / FILE
    return int(_read(path)[0]["level"]) if os.path.lexists(path) else None


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (OSError, SafetensorError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise _refused(path, f"it cannot be read ({reason})") from error
    if (
        facts.get("format") not in (_FORMAT, _WITHOUT_SAMPLES)
        or not facts.get("level", "").isdecimal()
    ):
        raise _refused(path, f"it is not a file of this format ({_FORMAT})")
    return facts, tensors


def _refused(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} does not hold the pre-gates of this checkpoint: {reason}; copy the file that was "
        "saved with it, or load the conventional model with pregate=False"
    )
