"""`pregates.safetensors`: the pre-gates of a model, beside its checkpoint or an adapter of it.

The checkpoint itself has the conventional gates, so that transformers loads the conventional model.
The file has both gates, and samples of each other tensor, which show whether it belongs to another
model, or to another training of the model.
"""

import functools
import inspect
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.find_experts import experts_paths
from overspill.moe.pregate import positions, subclass
from overspill.tiers.aside import sync

FILE = "pregates.safetensors"
_FORMAT, _WITHOUT_SAMPLES = "overspill-pregates-2", "overspill-pregates-1"
OWN, CONVENTIONAL, SAMPLE = "pregate.", "gate.", "sample."
_SAMPLES = 1024
"""Largest number of sampled elements of a tensor."""


def gate_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the pre-gates, with their names in the model's state dict."""
    return {
        f"{path}.{name}": tensor
        for path, gate, position in positions(model)
        if position.is_pregate
        for name, tensor in gate.state_dict().items()
    }


def trained_pregates(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of pre-gates that are not frozen."""
    gates = [gate for _, gate, position in positions(model) if position.is_pregate]
    return [each for gate in gates for each in gate.parameters() if each.requires_grad]


def conventional_gates(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that the pre-gates have replaced."""
    return {
        f"{path}.{name}": tensor
        for path, _, position in positions(model)
        for name, tensor in position.conventional.items()
    }


# -- saving --------------------------------------------------------------------------------------


def save_with_pregates(model: Any) -> None:
    """Make `model.save_pretrained` write the conventional model, and the pre-gates beside it."""
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
        samples = {name: sample(state[name]) for name in other_tensors(self) if name in state}
        others = asked.pop("kwargs", {})
        plain(**asked, **others, state_dict=state | conventional_gates(self))
        if writes:
            _write(Path(asked["save_directory"]), self, own, samples)

    return subclass(kind, {"save_pretrained": save_pretrained}, kind.__module__)


def save_beside_adapter(model: Any, folder: Path) -> None:
    """Write the pre-gates of the base model of peft's adapters to their folder. The samples are of
    the weights without the adapters."""
    samples = {
        name.replace(".base_layer.", "."): sample(tensor)
        for name, tensor in other_tensors(model).items()
        if "lora_" not in name
    }
    _write(folder, model, gate_tensors(model), samples)


def other_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters outside of gates and experts."""
    gates = {id(p) for _, gate, _ in positions(model) for p in gate.parameters()}
    experts = tuple(f"{path}." for path in experts_paths(model))
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in gates and not name.startswith(experts)
    }


@torch.no_grad()
def sample(tensor: Tensor) -> Tensor:
    """Return elements from everywhere in a tensor; in bf16 training changes few of them."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    return flat[::step][:_SAMPLES].cpu()


def _write(folder: Path, model: Any, own: dict[str, Tensor], samples: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    gates = conventional_gates(model)
    tensors = {OWN + name: tensor for name, tensor in own.items()}
    tensors |= {CONVENTIONAL + name: tensor for name, tensor in gates.items()}
    tensors |= {SAMPLE + name: tensor for name, tensor in samples.items()}
    facts = {
        "format": _FORMAT,
        "level": str(next(position.level for _, _, position in positions(model))),
        "model_type": model.config.model_type,
    }
    part = folder / f"{FILE}.part"
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, part, facts)
    os.replace(part, folder / FILE)
    sync(folder)


def saved_gates(folder: Path) -> set[str]:
    """Return the names of the gates in a folder that pre-gates replace."""
    if not has_pregates(folder):
        return set()
    _, tensors = read_file(folder / FILE)
    return {n.removeprefix(CONVENTIONAL) for n in tensors if n.startswith(CONVENTIONAL)}


def has_pregates(folder: Path) -> bool:
    """Return whether there is a file of pre-gates, or a link to nothing, which cannot be read."""
    return os.path.lexists(folder / FILE)


def copy_pregates(folder: Path, out: Path, samples: dict[str, Tensor]) -> None:
    """Copy the file to the folder of a model in which other tensors have changed: `samples` are
    samples of these."""
    from safetensors.torch import save_file

    if not has_pregates(folder):
        return
    facts, tensors = read_file(folder / FILE)
    known = {SAMPLE + name: tensor for name, tensor in samples.items()}
    changed = {name: known.get(name, tensor) for name, tensor in tensors.items()}
    save_file(changed, out / FILE, facts)


def saved_level(folder: Path) -> int | None:
    """Return the level of the pre-gates in a folder; None if there are none."""
    return int(read_file(folder / FILE)[0]["level"]) if has_pregates(folder) else None


def read_file(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (OSError, SafetensorError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise refused(path, f"it cannot be read ({reason})") from error
    if (
        facts.get("format") not in (_FORMAT, _WITHOUT_SAMPLES)
        or not facts.get("level", "").isdecimal()
    ):
        raise refused(path, f"it is not a file of this format ({_FORMAT})")
    return facts, tensors


def refused(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} does not hold the pre-gates of this checkpoint: {reason}; copy the file that was "
        "saved with it, or load the conventional model with pregate=False"
    )
