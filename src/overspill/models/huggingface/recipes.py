"""Reads a model's experts from a checkpoint, one expert at a time."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.experts import ExpertId
from overspill.models.huggingface.conversion import (
    Sources,
    find_sources,
)
from overspill.models.huggingface.experts import HuggingFaceExperts
from overspill.models.huggingface.lora import LoraTensors
from overspill.models.huggingface.packed.tensor import PackedTensor
from overspill.moe.placeholder import Place
from overspill.moe.state_dict import split_record
from overspill.tiers.layout import NO_LOW_RANKS
from overspill.tiers.safetensors_stream import TensorSpec


class Tensors(Protocol):
    """Tensors of a checkpoint, by name."""

    folder: Path
    specs: dict[str, TensorSpec]
    packed: dict[str, PackedTensor]

    def read(self, name: str, offset: int, out: Tensor) -> None:
        """Fill `out`, in its dtype, with the elements of a tensor from `offset` on."""


class Recipes:
    """Sources of every expert tensor, checked before any memory is allocated."""

    format = None
    ranks = NO_LOW_RANKS

    def __init__(
        self,
        model: Any,
        layers: Sequence[HuggingFaceExperts],
        folder: Tensors,
        lora: LoraTensors | None = None,
        adds_to_experts: bool = True,
    ) -> None:
        """`lora` is an adapter that is added to the experts. Without `adds_to_experts`, it is only
        added to experts that are not in stacks."""
        self.model, self.layers, self.folder, self._lora = model, layers, folder, lora
        self._adds_to_stacks = adds_to_experts
        self._sources = self._match()
        for layer in layers:
            for index in range(layer.n_experts):
                for place, size in zip(layer.places(index), layer.shape.sizes, strict=True):
                    self._check(layer, place, size)

    def _match(self) -> dict[str, Sources]:
        """Return the sources of each tensor of experts."""
        from transformers.core_model_loading import dot_natural_key

        wanted = {
            f"{layer.path}.{place.name}"
            for layer in self.layers
            for index in range(layer.n_experts)
            for place in layer.places(index)
        }
        keys = sorted(self.folder.specs, key=dot_natural_key)  # expert 10 follows expert 9
        return find_sources(
            self.model, wanted, keys, lambda _, targets: [t for t in targets if t.name in wanted]
        )

    def _check(self, layer: HuggingFaceExperts, place: Place, size: tuple[int, ...]) -> None:
        folder, name = self.folder.folder, f"{layer.path}.{place.name}"
        sources = self._sources.get(name)
        if sources is None:
            raise CheckpointError(
                f"{folder} contains nothing for {name}; it is incomplete, or config.json is of "
                "another model"
            )
        if sources.converter is None and len(sources.keys[""]) != 1:
            raise CheckpointError(
                f"{folder} contains {name} twice: {' and '.join(sources.keys[''][:2])}"
            )
        for keys in sources.keys.values() if sources.converter is not None else ():
            whole = (layer.n_experts,) if sources.merges else (1, layer.n_experts)
            if len(keys) not in whole:
                raise CheckpointError(
                    f"{folder} contains {len(keys)} of the {layer.n_experts} experts of {name}; "
                    "download it again"
                )
        key, shape = self._shape(sources, place, name, size)
        stack = sources.converter is None and place.expert is not None
        expected = (layer.n_experts, *size) if stack else size
        if shape != expected:
            raise CheckpointError(
                f"{folder}: {key} gives {name} the shape {list(shape)}, config.json says "
                f"{list(expected)}; they are not of the same model"
            )

    def _shape(
        self, sources: Sources, place: Place, name: str, size: tuple[int, ...]
    ) -> tuple[str, tuple[int, ...]]:
        """Return a source of the tensor, and the shape that it gives the tensor."""
        specs = self.folder.specs
        if sources.converter is None:
            (key,) = sources.keys[""]
            return key, specs[key].shape
        if not sources.merges:
            with torch.device("meta"):
                made = self._convert(sources, place, name, size, _on_meta)
            return next(iter(sources.keys.values()))[0], tuple(made.shape)
        assert place.expert is not None
        keys = sources.parts(place.expert)
        shapes = [specs[key].shape for key in keys]
        if len({shape[1:] for shape in shapes}) != 1:
            return keys[0], shapes[0]
        return keys[0], (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def buffer_bytes(self) -> int:
        """Bytes that `fill` needs besides a record, if experts are converted while loading."""
        layer = self.layers[0]
        return 2 * layer.shape.numel * layer.dtype.itemsize if self._copies else 0

    def name(self, expert: ExpertId, number: int) -> str:
        """Return the name in the model of a tensor of an expert."""
        layer = self.layers[expert.layer]
        return f"{layer.path}.{layer.places(expert.index)[number].name}"

    def dtypes(self, expert: ExpertId) -> tuple[torch.dtype, ...]:
        """Return the types of the tensors of an expert in the checkpoint, which represent all its
        values."""
        specs, layer = self.folder.specs, self.layers[expert.layer]
        found = []
        for place in layer.places(expert.index):
            sources = self._sources[f"{layer.path}.{place.name}"]
            keys = sources.all_keys
            if sources.converter is not None and sources.merges and place.expert is not None:
                keys = sources.parts(place.expert)
            found.append(functools.reduce(torch.promote_types, (specs[key].dtype for key in keys)))
        return tuple(found)

    @property
    def keys(self) -> list[str]:
        """Names of the tensors of the checkpoint with experts."""
        return [key for sources in self._sources.values() for key in sources.all_keys]

    @property
    def converted(self) -> str | None:
        """Name of a tensor of experts that the family's own code makes of stored tensors; None
        without such a tensor."""
        made = (name for name, sources in self._sources.items() if sources.is_converted)
        return next(made, None)

    @property
    def _copies(self) -> bool:
        return any(
            self._changes(name)
            or sources.is_converted
            or any(key in self.folder.packed for key in sources.all_keys)
            or any(self.folder.specs[key].dtype != self.layers[0].dtype for key in sources.all_keys)
            for name, sources in self._sources.items()
        )

    def stored(self, expert: ExpertId) -> Iterator[tuple[int, str, int]]:
        """Yield the tensors of the checkpoint that follow each other in an expert's record: number
        of the expert's tensor, name, index in a stack. Raises if the record needs other values."""
        layer = self.layers[expert.layer]
        for number, place in enumerate(layer.places(expert.index)):
            name = f"{layer.path}.{place.name}"
            sources = self._sources[name]
            if self._changes(name):
                raise ConfigError(
                    f"the adapter changes experts ({name}), which then cannot stay packed "
                    "(LLM(adapter=...) keeps it beside packed experts)"
                )
            if sources.converter is None:
                (key,) = sources.keys[""]
                yield number, key, place.expert or 0
            elif sources.merges and place.expert is not None:
                yield from ((number, key, 0) for key in sources.parts(place.expert))
            else:
                raise ConfigError(
                    f"experts of {self.model.config.model_type} are converted while they are read, "
                    "and cannot stay packed"
                )

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        """Read one expert into its record."""
        layer = self.layers[expert.layer]
        parts = split_record(record, layer.shape)
        for place, part in zip(layer.places(expert.index), parts, strict=True):
            name = f"{layer.path}.{place.name}"
            read = functools.partial(self._read, name, place)
            if self._lora is not None and self._changes(name):
                self._lora.change_expert(name, place.expert, part, read)
            else:
                read(part)

    def _changes(self, name: str) -> bool:
        """Return whether the adapter is added to a tensor of experts."""
        if self._lora is None or (name in self._lora.stacks and not self._adds_to_stacks):
            return False
        return self._lora.changes(name)

    def _read(self, name: str, place: Place, part: Tensor) -> None:
        """Read one tensor of an expert."""
        sources = self._sources[name]
        if sources.converter is None:
            (key,) = sources.keys[""]
            self.folder.read(key, (place.expert or 0) * part.numel(), part)
        elif sources.merges:
            self._read_parts(sources, place, part)
        else:
            size = tuple(part.shape)
            part.copy_(self._convert(sources, place, name, size, self._read_new))

    def _read_parts(self, sources: Sources, place: Place, part: Tensor) -> None:
        assert place.expert is not None
        flat, at = part.view(-1), 0
        for key in sources.parts(place.expert):
            length = self.folder.specs[key].numel
            self.folder.read(key, 0, flat[at : at + length])
            at += length

    def _convert(
        self,
        sources: Sources,
        place: Place,
        name: str,
        size: tuple[int, ...],
        read: Callable[[torch.dtype, tuple[int, ...], str, int], Tensor],
    ) -> Tensor:
        """Run the family's converter on the tensors of one expert, as a stack of one."""
        expert = place.expert or 0

        def tensors() -> Iterator[tuple[str, str, Tensor]]:
            for pattern, keys in sources.keys.items():
                # a stack has one dimension more than an expert of it
                stacked = len(keys) == 1 and len(self.folder.specs[keys[0]].shape) > len(size)
                key = keys[0] if stacked else keys[expert]
                spec = self.folder.specs[key]
                shape = (1, *spec.shape[1:]) if stacked else spec.shape
                offset = expert * (spec.numel // max(1, spec.shape[0])) if stacked else 0
                yield key, pattern, read(spec.dtype, shape, key, offset)

        value = sources.convert(name, tensors(), (1, *size), self.model.config)[name]
        return value[0] if value.dim() > len(size) else value

    def _read_new(self, dtype: torch.dtype, shape: tuple[int, ...], key: str, at: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self.folder.read(key, at, tensor)
        return tensor


def _on_meta(dtype: torch.dtype, shape: tuple[int, ...], key: str, at: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
