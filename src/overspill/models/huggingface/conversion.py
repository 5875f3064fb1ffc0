"""transformers' weight conversions: from the names and layouts of checkpoints to those of a model.

A checkpoint may hold experts one by one or stacked, under other names, or transposed. transformers
has rules for each family: renamings, and converters that make a tensor of the model from several
tensors of a checkpoint.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass
class Sources:
    """The checkpoint tensors that one tensor of the model is made of."""

    converter: Any = None
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Names of tensors by source pattern of the converter, in natural order; without a converter,
    under ""."""

    @property
    def all_keys(self) -> list[str]:
        """The names of all source tensors."""
        return [key for keys in self.keys.values() for key in keys]

    @property
    def is_converted(self) -> bool:
        """Whether the family's own code makes the tensor of its sources."""
        return self.converter is not None and not self.merges

    @property
    def merges(self) -> bool:
        """Whether the converter only stacks experts and concatenates their parts."""
        kinds = [type(op).__name__ for op in self.converter.operations]
        dims = [getattr(op, "dim", None) for op in self.converter.operations]
        return (kinds, dims) in (
            (["MergeModulelist"], [0]),
            (["MergeModulelist", "Concatenate"], [0, 1]),
        )

    def parts(self, expert: int) -> list[str]:
        """Return the tensors of one expert, if each expert has tensors of its own."""
        patterns = [p for p in self.converter.source_patterns if p in self.keys]
        return [self.keys[pattern][expert] for pattern in patterns]

    def add(self, key: str, pattern: str | None, converters: Mapping[str, Any]) -> None:
        if pattern is not None:
            self.converter = converters[pattern]
        self.keys.setdefault(pattern or "", []).append(key)

    def convert(
        self,
        target: str,
        tensors: Iterable[tuple[str, str, Tensor]],
        shape: tuple[int, ...],
        config: Any,
    ) -> dict[str, Tensor]:
        """Run the converter on (key, pattern, tensor); `shape` is the shape of the target."""
        converter = deepcopy(self.converter)
        for key, pattern, tensor in tensors:
            converter.add_tensor(target, key, pattern, tensor)
        made = converter.convert(target, model=_Target(shape), config=config)
        return {n: value[0] if isinstance(value, list) else value for n, value in made.items()}


class _Target:
    """Replacement of the model for converters that read the shape of their target."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._shape, device="meta")


class Target(NamedTuple):
    """A tensor of the model that a tensor of a checkpoint is a source of."""

    name: str
    pattern: str | None
    """The source pattern of the converter that makes it; None without a converter."""


Renamer = Callable[[str], list[Target]]


def renamer(model: Any, extra: set[str]) -> tuple[Renamer, Mapping[str, Any]]:
    """Return a function from a name in a checkpoint to its targets in the model, and the converters
    by pattern. `extra` are names of parameters that the model no longer has."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    names = dict.fromkeys([*(n for n, _ in model.named_parameters()), *extra], True)
    names.update(dict.fromkeys((n for n, _ in model.named_buffers()), True))
    prefix = model.base_model_prefix

    def rename(key: str) -> list[Target]:
        target, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if target not in names and key in names:
            target, pattern = rename_source_key(key, [], [], prefix, names)
        if pattern is None:
            return [Target(target, None)]
        first, *others = by_pattern[pattern].target_patterns
        return [Target(target.replace(first, name), pattern) for name in (first, *others)]

    return rename, by_pattern


def find_sources(
    model: Any,
    experts: set[str],
    keys: Iterable[str],
    choose: Callable[[str, list[Target]], list[Target]],
) -> dict[str, Sources]:
    """Return the sources of tensors of the model among the tensors `keys` of a checkpoint.

    `experts` are names of parameters that the model no longer has. `choose` gets a key and its
    targets, and returns the targets to keep.
    """
    rename, converters = renamer(model, experts)
    found: dict[str, Sources] = {}
    for key in keys:
        for name, pattern in choose(key, rename(key)):
            found.setdefault(name, Sources()).add(key, pattern, converters)
    return found


def reverted(
    model: Any, conversions: Sequence[Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return experts' tensors of a model with the names and layout of the original checkpoint;
    `conversions` is the result of `model_conversions`."""
    from transformers.core_model_loading import revert_weight_conversion

    stand_in: Any = _WithExperts(model, conversions, tensors)
    made: dict[str, Tensor] = revert_weight_conversion(stand_in, tensors)
    return made


class _WithExperts:
    """Replacement of a model with its conversions, and with the experts' parameters for converters
    that read their shapes."""

    def __init__(self, model: Any, conversions: Sequence[Any], tensors: dict[str, Tensor]) -> None:
        self._model, self._tensors = model, tensors
        self._weight_conversions = conversions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> Tensor:
        return self._tensors[name]


def model_conversions(model: Any) -> Sequence[Any]:
    """Return the conversions for `revert_weight_conversion`. For a model that was not loaded, it
    would collect them again in each call: half of the time of saving small experts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    found: Sequence[Any] | None = getattr(model, "_weight_conversions", None)
    if found is None:
        default = get_model_conversion_mapping(model, add_legacy=False)
        found = [each for each in default if not isinstance(each, PrefixChange)]
    return found
