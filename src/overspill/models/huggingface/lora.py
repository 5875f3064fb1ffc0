"""LoRA adapters in peft's format, added to the tensors of a checkpoint as these are read.

`W + scale * B @ A` is computed in float32 on the CPU and rounded once, so that a served adapter and
a merged checkpoint have the same weights. peft itself is not needed.
"""

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.checks import ADAPTER_CONFIG, CONFIG
from overspill.models.huggingface.conversion import renamer
from overspill.models.huggingface.expert_lora import StackMatching
from overspill.models.huggingface.experts import HuggingFaceExperts
from overspill.models.huggingface.find_experts import find_experts
from overspill.models.huggingface.folder import CheckpointFolder
from overspill.models.huggingface.lora_config import (
    MATRIX_A,
    MATRIX_B,
    WEIGHTS,
    LoraConfig,
    read_lora_config,
)
from overspill.models.huggingface.pregate_file import saved_gates
from overspill.moe.state_dict import dense_tensors
from overspill.tiers.safetensors_stream import StreamReader

_log = logging.getLogger("overspill")
_PREFIX = "base_model.model."
_BIAS = "lora_B.bias"
_TABLE_A, _TABLE_B = "lora_embedding_A", "lora_embedding_B"
_FAMILIES = "transformers.models."


@dataclass(frozen=True)
class Change:
    """Change of one tensor of the base of an adapter, by names of tensors in the adapter."""

    replacement: str | None = None
    """Tensor that replaces the tensor of the base, before anything is added."""
    a: str | None = None
    b: str | None = None
    """Second factor of the product B @ A, which is added."""
    bias: str | None = None
    """Bias that is added."""
    scale: float = 1.0
    transposed: bool = False
    """Whether the product is transposed: embeddings have a row for each token."""


Read = Callable[[Tensor], None]
"""Function that fills a tensor."""


class LoraTensors:
    """Tensors of a checkpoint that an adapter changes. `model` is of the checkpoint's class, on the
    meta device, with its experts."""

    def __init__(
        self, config: LoraConfig, reader: StreamReader, model: Any, base: CheckpointFolder
    ) -> None:
        self.model = model
        self._reader, self._base = reader, base
        self.layers: Sequence[HuggingFaceExperts] = find_experts(model)
        matching = _Matching(config, reader, model, self.layers)
        self._changes = matching.changes()
        self.stacks = matching.stacks.changes(self._wide)
        """Changes to stacks of experts."""
        self.keys = self._find_sources(model)
        """Name in the checkpoint of each other changed tensor, by its name in the model."""
        self._check_finite()
        for folder in (base.folder, config.folder):
            for name in sorted(saved_gates(folder) & self._changes.keys()):
                raise ConfigError(
                    f"{config.folder} changes {name}, and {folder} has a pre-gate in its place, "
                    "which the adapter would not change; give an adapter of other layers"
                )

    def _find_sources(self, model: Any) -> dict[str, str]:
        rename, _ = renamer(model, set())
        shapes = {name: tuple(tensor.shape) for name, tensor in dense_tensors(model).items()}
        found: dict[str, str] = {}
        for key, spec in self._base.specs.items():
            for name, pattern in rename(key):
                if name not in self._changes:
                    continue
                if pattern is not None or name in found:
                    raise ConfigError(
                        f"the adapter changes {name}, which {self._base.folder} stores in several "
                        "tensors; this is not supported; merge this adapter with peft"
                    )
                if spec.shape != shapes[name]:
                    raise CheckpointError(
                        f"{self._base.folder} gives {name} the shape {list(spec.shape)}, "
                        f"config.json says {list(shapes[name])}; they are not of the same model"
                    )
                found[name] = key
        for name in sorted(self._changes.keys() - found.keys()):
            raise CheckpointError(f"{self._base.folder} holds nothing for {name}; it is incomplete")
        return found

    def _check_finite(self) -> None:
        for key in self._reader.specs:
            if not self._reader.read(key).isfinite().all():
                raise CheckpointError(
                    f"{self._reader.path}: {key} has values that are NaN or infinite; train the "
                    "adapter again, or give an earlier one of its run"
                )

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Return the changed tensor, not rounded to the dtype of the checkpoint."""
        change = self._changes[name]
        if change.replacement is not None:
            weight = self._wide(change.replacement)
        else:
            weight = _widened(self._base.read_whole(self.keys[name]))
        if change.a is not None and change.b is not None:
            product = self._wide(change.b) @ self._wide(change.a)
            weight += (product.T if change.transposed else product) * change.scale
        if change.bias is not None:
            weight += self._wide(change.bias) * change.scale
        return weight

    def _wide(self, key: str) -> Tensor:
        return _widened(self._reader.read(key))

    @torch.no_grad()
    def write_to(self, model: nn.Module) -> None:
        """Change a model that holds the tensors of the checkpoint, in its dtype."""
        tensors = dense_tensors(model)
        for name in self.keys:
            if name in tensors:  # else of an expert, which `change_expert` reads
                tensors[name].copy_(self.read(name))

    def changes(self, name: str) -> bool:
        """Return whether a tensor of the model is changed."""
        return name in self._changes or name in self.stacks

    @torch.no_grad()
    def change_expert(self, name: str, expert: int | None, part: Tensor, read: Read) -> None:
        """Write the changed tensor of an expert, which `read` reads from the checkpoint."""
        if expert is None:  # a tensor of its own
            part.copy_(self.read(name))
            return
        weight = torch.empty(part.shape, dtype=torch.promote_types(part.dtype, torch.float32))
        read(weight)
        self.stacks.add_to(weight, name, expert)
        part.copy_(weight)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@contextmanager
def open_lora(
    adapter: Path, kind: Any, config: Any, base: CheckpointFolder
) -> Iterator[LoraTensors]:
    """Open the adapter in a folder for a checkpoint whose model has this class and config."""
    lora = read_lora_config(adapter)
    _check_type(lora, base.folder)
    with torch.device("meta"):
        model = kind(copy.deepcopy(config)).eval()  # a constructor may change it
    with StreamReader(adapter / WEIGHTS, advice="copy or download the adapter again") as reader:
        tensors = LoraTensors(lora, reader, model, base)
        _warn_of_another(lora, base.folder)
        yield tensors


def _check_type(lora: LoraConfig, folder: Path) -> None:
    """Raise if the adapter names a base model that is there and of another type than the one in
    `folder`."""
    theirs = None if lora.base is None else _model_type(Path(lora.base).expanduser())
    own = _model_type(folder)
    if theirs is not None and own is not None and theirs != own:
        raise lora.refused(
            f"its base model is of {theirs}, and this one of {own} ({CONFIG} of {lora.base})"
        )


def _warn_of_another(lora: LoraConfig, folder: Path) -> None:
    """Log a warning if the adapter names a base model of another name: it may have other
    weights."""
    if lora.base is not None and Path(lora.base).name.casefold() != _name_of(folder).casefold():
        _log.warning(
            "the adapter %s was trained on %s, and is added to the weights of %s",
            lora.folder,
            lora.base,
            folder,
        )


def _model_type(folder: Path) -> str | None:
    """Return the model type in a folder's config; None if there is none."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _name_of(folder: Path) -> str:
    """Return the name of a checkpoint: of its folder, or in a cache of the hub of its
    repository."""
    cached = [part for part in folder.parts if part.startswith("models--")]
    return cached[-1].rpartition("--")[2] if cached else folder.absolute().name


class _Matching:
    """Finds what each tensor of an adapter does to its base, and refuses the ones of other
    models."""

    def __init__(
        self,
        config: LoraConfig,
        reader: StreamReader,
        model: Any,
        layers: Sequence[HuggingFaceExperts],
    ) -> None:
        self._config, self._reader, self._model = config, reader, model
        self._tensors = dense_tensors(model)
        self._rename, converters = renamer(model, set())
        self.stacks = StackMatching(config, reader, layers, self._rename, converters)
        self._changes: dict[str, Change] = {}

    def changes(self) -> Mapping[str, Change]:
        self._check_family()
        for key in self._reader.specs:
            self._add(key)
        if not self._changes and not self.stacks.parts:
            raise self._config.refused("it holds no tensors")
        for name, change in self._changes.items():
            self._check_alone(name)
            self._check_shapes(name, change)
        self._check_complete()
        self.stacks.check()
        return self._changes

    def _check_family(self) -> None:
        """Raise if the adapter names a base model of another family."""
        theirs, own = self._config.library or "", type(self._model).__module__
        if theirs != own and theirs.startswith(_FAMILIES) and own.startswith(_FAMILIES):
            raise self._config.refused(
                f"its base model is of {theirs.removeprefix(_FAMILIES).partition('.')[0]}, and "
                f"this one of {own.removeprefix(_FAMILIES).partition('.')[0]} "
                f"(auto_mapping of {ADAPTER_CONFIG})"
            )

    def _add(self, key: str) -> None:
        path = key.removeprefix(_PREFIX)
        if not self._reader.specs[key].dtype.is_floating_point:
            raise self._config.refused(f"{key} is not of a floating-point type")
        if self.stacks.add(path, key):
            return
        for end, field in ((MATRIX_A, "a"), (MATRIX_B, "b"), (_TABLE_A, "a"), (_TABLE_B, "b")):
            if path.endswith(f".{end}"):
                name = self._find(path.removesuffix(end) + "weight", key)
                is_table = end in (_TABLE_A, _TABLE_B)
                self._note(name, **{field: key}, transposed=is_table)
                return
        if path.endswith(f".{_BIAS}"):
            self._note(self._find(path.removesuffix(_BIAS) + "bias", key), bias=key)
        elif "lora_" in path or "trainable_tokens" in path:
            what = "DoRA" if "magnitude" in path else "this kind of adapter"
            raise ConfigError(
                f"{self._config.folder} has {key}: {what} is not supported; merge it with peft"
            )
        else:  # modules_to_save, biases that were trained, embeddings
            self._note(self._find(path.replace(".base_layer.", "."), key), replacement=key)

    def _note(self, name: str, **facts: Any) -> None:
        known = self._changes.get(name, Change())
        if any(getattr(known, f) is not None for f in facts if f != "transposed"):
            raise self._config.refused(f"two of its tensors are for {name}")
        self._changes[name] = replace(
            known, **facts, scale=self._config.scale_of(self._owner(name))
        )

    def _owner(self, name: str) -> str:
        """Return the name that patterns of ranks and alphas match: a module, or a targeted
        parameter."""
        return name if self._config.targets_parameter(name) else name.rpartition(".")[0]

    def _find(self, name: str, key: str) -> str:
        """Return the name in the model; the adapter may have the name of earlier transformers."""
        renamed = name if name in self._tensors else self._rename(name)[0][0]
        if self.stacks.names(renamed):
            raise ConfigError(
                f"{self._config.folder} has {key}, which replaces the experts of a layer; this is "
                "not supported; merge this adapter with peft"
            )
        if renamed not in self._tensors:
            where = f"has no {name}"
            if key.endswith(_BIAS):
                where += ": a layer without a bias cannot take that of lora_bias"
            raise self._config.refused(
                f"it has {key}, and this {self._model.config.model_type} {where}"
            )
        return renamed

    def _check_alone(self, name: str) -> None:
        """Raise for a tensor that other modules use too: the adapter is for one of them."""
        shared = [n for n, t in self._tensors.items() if t is self._tensors[name] and n != name]
        if shared:
            raise ConfigError(
                f"{self._config.folder} changes {name}, which is also {shared[0]} in this model "
                "(tie_word_embeddings); such adapters are not supported; untie them, or train an "
                "adapter of other layers"
            )

    def _check_shapes(self, name: str, change: Change) -> None:
        shape = tuple(self._tensors[name].shape)
        module = self._model.get_submodule(name.rpartition(".")[0])
        for key in filter(None, (change.replacement, change.bias)):
            if self._reader.specs[key].shape != shape:
                raise self._other_shape(key, self._reader.specs[key].shape, name, shape)
        if change.a is None and change.b is None:
            return
        if change.a is None or change.b is None:
            raise self._config.refused(f"it has {change.a or change.b} without the other matrix")
        is_table, kind = isinstance(module, nn.Embedding), type(module).__name__
        if len(shape) != 2 or change.transposed != is_table or kind == "Conv1D":
            raise ConfigError(
                f"{self._config.folder} has {change.a} for a {kind}, which is not supported; merge "
                "this adapter with peft"
            )
        rows, columns = shape[::-1] if change.transposed else shape
        rank = self._config.rank_of(self._owner(name))
        for key, expected in ((change.a, (rank, columns)), (change.b, (rows, rank))):
            if self._reader.specs[key].shape != expected:
                raise self._other_shape(key, self._reader.specs[key].shape, name, expected)

    def _other_shape(
        self, key: str, shape: tuple[int, ...], name: str, expected: tuple[int, ...]
    ) -> CheckpointError:
        return self._config.refused(
            f"{key} has the shape {list(shape)}; for {name} of this model and the ranks of "
            f"{ADAPTER_CONFIG} it would be {list(expected)}"
        )

    def _check_complete(self) -> None:
        """Raises if modules that the config names have no tensors: the adapter of a model with
        fewer layers would change a part of this one."""
        kinds = (nn.Linear, nn.Embedding)
        for path, module in self._model.named_modules():
            named = any(path == end or path.endswith(f".{end}") for end in self._config.targets)
            if named and isinstance(module, kinds) and f"{path}.weight" not in self._changes:
                raise self._config.refused(
                    f"it has nothing for {path}, which its target_modules name"
                )
