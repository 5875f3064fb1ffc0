"""From the tensors of a checkpoint to those of a model's experts, one expert at a time.

A checkpoint may hold experts one by one or stacked, under other names and the other way round;
transformers knows how each family does it (renamings and converters). Here the same rules are
applied to a single expert.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import CheckpointError
from overspill.core.experts import ExpertId
from overspill.models.huggingface.experts import HuggingFaceExperts
from overspill.models.huggingface.folder import CheckpointFolder
from overspill.moe.state_dict import Place, split_record


@dataclass
class Sources:
    """The checkpoint tensors that one tensor of the model is made of."""

    converter: Any = None
    keys: dict[str, list[str]] = field(default_factory=dict)
    """By the converter's source pattern, in natural order; without one, under "" alone."""

    @property
    def plain(self) -> bool:
        """Whether experts are merely stacked, and their pieces put one below the other."""
        kinds = [type(op).__name__ for op in self.converter.operations]
        dims = [getattr(op, "dim", None) for op in self.converter.operations]
        return (kinds, dims) in (
            (["MergeModulelist"], [0]),
            (["MergeModulelist", "Concatenate"], [0, 1]),
        )

    def pieces(self, row: int) -> list[str]:
        """The tensors of one expert, where each has its own."""
        patterns = [p for p in self.converter.source_patterns if p in self.keys]
        return [self.keys[pattern][row] for pattern in patterns]


class Recipes:
    """How to fill the records of a model's experts from a checkpoint."""

    def __init__(
        self, model: Any, layers: Sequence[HuggingFaceExperts], folder: CheckpointFolder
    ) -> None:
        self.model, self.layers, self.folder = model, layers, folder
        self._wanted = {
            f"{layer.path}.{place.name}"
            for layer in layers
            for index in range(layer.n_experts)
            for place in layer.places(index)
        }
        self._sources = self._match()
        self._check()

    def _match(self) -> dict[str, Sources]:
        """Goes through all names as transformers does, and keeps those that lead to experts."""
        rename, converters = renamer(self.model, self._wanted)
        found: dict[str, Sources] = {}
        for key in in_order(self.folder.specs):
            for target, pattern in rename(key):
                if target in self._wanted:
                    sources = found.setdefault(target, Sources())
                    if pattern is not None:
                        sources.converter = converters[pattern]
                    sources.keys.setdefault(pattern or "", []).append(key)
        return found

    def _check(self) -> None:
        """Before memory is taken: every tensor of every expert is there, in the right shape."""
        for layer in self.layers:
            for index in range(layer.n_experts):
                for place, size in zip(layer.places(index), layer.shape.sizes, strict=True):
                    self._check_place(layer, place, size)

    def _check_place(self, layer: HuggingFaceExperts, place: Place, size: tuple[int, ...]) -> None:
        name = f"{layer.path}.{place.name}"
        sources = self._sources.get(name)
        if sources is None:
            raise CheckpointError(
                f"{self.folder.folder} holds nothing for {name}; it is not complete, or of another "
                "model than its config.json says"
            )
        if sources.converter is None and len(sources.keys[""]) != 1:
            raise CheckpointError(
                f"{self.folder.folder} holds {name} twice: {' and '.join(sources.keys[''][:2])}"
            )
        for keys in sources.keys.values() if sources.converter is not None else ():
            whole = (layer.n_experts,) if sources.plain else (1, layer.n_experts)
            if len(keys) not in whole:
                raise CheckpointError(
                    f"{self.folder.folder} holds {len(keys)} of the {layer.n_experts} experts of "
                    f"{name}; download it again"
                )
        if sources.converter is None:
            (key,) = sources.keys[""]
            shape = self.folder.specs[key].shape
            expected = size if place.row is None else (layer.n_experts, *size)
        elif sources.plain:
            key, shape = self._plain_shape(sources, place)
            expected = size
        else:
            key = next(iter(sources.keys.values()))[0]
            with torch.device("meta"):
                shape = tuple(self._convert(sources, place, name, size, _meta_of).shape)
            expected = size
        if shape != expected:
            raise CheckpointError(
                f"{self.folder.folder}: {key} gives {name} the shape {list(shape)}, config.json "
                f"says {list(expected)}; they are not of the same model"
            )

    def _plain_shape(self, sources: Sources, place: Place) -> tuple[str, tuple[int, ...]]:
        assert place.row is not None
        keys = sources.pieces(place.row)
        shapes = [self.folder.specs[key].shape for key in keys]
        if len({shape[1:] for shape in shapes}) != 1:
            return keys[0], shapes[0]
        return keys[0], (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def copies(self) -> bool:
        """Whether experts are converted on their way, in memory beside their records."""
        return any(
            not (sources.converter is None or sources.plain)
            or any(self.folder.specs[key].dtype != self.layers[0].dtype for key in keys)
            for sources in self._sources.values()
            for keys in sources.keys.values()
        )

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        """Reads one expert into its record."""
        layer = self.layers[expert.layer]
        parts = split_record(record, layer.shape)
        for place, part in zip(layer.places(expert.index), parts, strict=True):
            name = f"{layer.path}.{place.name}"
            sources = self._sources[name]
            if sources.converter is None:
                (key,) = sources.keys[""]
                self.folder.read(key, (place.row or 0) * part.numel(), part)
            elif sources.plain:
                self._read_pieces(sources, place, part)
            else:
                part.copy_(self._convert(sources, place, name, tuple(part.shape), self._read_new))

    def _read_pieces(self, sources: Sources, place: Place, part: Tensor) -> None:
        assert place.row is not None
        flat, at = part.view(-1), 0
        for key in sources.pieces(place.row):
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
        """Runs the family's own converter on the tensors of one expert."""
        converter = deepcopy(sources.converter)
        for pattern, keys in sources.keys.items():
            # a stack has one dimension more than an expert of it
            stacked = len(keys) == 1 and len(self.folder.specs[keys[0]].shape) > len(size)
            key = keys[0] if stacked else keys[place.row or 0]
            spec = self.folder.specs[key]
            shape = (1, *spec.shape[1:]) if stacked else spec.shape
            offset = (place.row or 0) * (spec.numel // max(1, spec.shape[0])) if stacked else 0
            converter.add_tensor(name, key, pattern, read(spec.dtype, shape, key, offset))
        made = converter.convert(name, model=_OneExpert(size), config=self.model.config)
        value: Tensor = made[name][0] if isinstance(made[name], list) else made[name]
        return value[0] if value.dim() > len(size) else value

    def _read_new(self, dtype: torch.dtype, shape: tuple[int, ...], key: str, at: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        self.folder.read(key, at, tensor)
        return tensor


def _meta_of(dtype: torch.dtype, shape: tuple[int, ...], key: str, at: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class _OneExpert:
    """Stands for the model where a converter compares with the shape of its target: a stack of one
    expert."""

    def __init__(self, size: tuple[int, ...]) -> None:
        self._shape = (1, *size)

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._shape, device="meta")


def in_order(names: Iterable[str]) -> list[str]:
    """As transformers sorts them: expert 10 comes after expert 9."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


Renamer = Callable[[str], list[tuple[str, str | None]]]


def renamer(model: Any, extra: set[str]) -> tuple[Renamer, Mapping[str, Any]]:
    """A function from a name in a checkpoint to (name in the model, pattern of the converter that
    makes it), and the converters by pattern. `extra` are names the model has lost."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    names = dict.fromkeys([*(n for n, _ in model.named_parameters()), *extra], True)
    names.update(dict.fromkeys((n for n, _ in model.named_buffers()), True))
    prefix = model.base_model_prefix

    def rename(key: str) -> list[tuple[str, str | None]]:
        target, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if target not in names and key in names:
            target, pattern = rename_source_key(key, [], [], prefix, names)
        if pattern is None:
            return [(target, None)]
        first, *others = by_pattern[pattern].target_patterns
        return [(target.replace(first, name), pattern) for name in (first, *others)]

    return rename, by_pattern
