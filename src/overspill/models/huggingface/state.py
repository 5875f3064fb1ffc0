"""`load_state_dict` of an offloaded model with the names of a checkpoint on disk.

transformers' Trainer resumes by giving every shard of a checkpoint to `load_state_dict`, under the
names in the file. They differ from those in the model: experts one by one, parts renamed, tensors
the other way round. Both are taken here, in any portion.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from overspill.models.huggingface.recipes import Sources, renamer
from overspill.moe.state_dict import Rows, dense_tensors, expert_sizes

Given = Tensor | Rows


def accept_checkpoint_names(model: nn.Module) -> None:
    """From now on `model.load_state_dict` takes the names of a checkpoint as well as its own."""
    model.register_load_state_dict_pre_hook(_translate)


def _translate(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *torchs_own: object
) -> None:
    """Puts what came under the names of the model, before torch or the experts look at it."""
    given = {
        key.removeprefix(prefix): value
        for key, value in state_dict.items()
        if key.startswith(prefix)
    }
    experts = expert_sizes(model)
    sizes = experts | {name: tuple(t.shape) for name, t in dense_tensors(model).items()}
    translated = _Translation(model, sizes, experts.keys()).translate(given)
    _check(model, prefix, sizes, translated)
    for key in given:
        del state_dict[prefix + key]
    state_dict.update({prefix + name: value for name, value in translated.items()})


class _Translation:
    """From the names of a checkpoint to those of the model, which have `sizes`."""

    def __init__(self, model: Any, sizes: Mapping[str, tuple[int, ...]], experts: Any) -> None:
        self.model, self.sizes, self.experts = model, sizes, experts

    def translate(self, given: Mapping[str, Tensor]) -> dict[str, Given]:
        """What is known under its name in the model; the rest keeps the name it came with, and
        torch says that it is unexpected."""
        made: dict[str, Given] = {}
        others = {}
        for key, value in given.items():
            if tuple(value.shape) == self.sizes.get(key) and not self._square(key):
                made[key] = value
            else:
                others[key] = value
        for target, sources in self._match(others, made).items():
            made |= self._make(target, sources, others)
        return made

    def _match(self, given: Mapping[str, Tensor], made: dict[str, Given]) -> dict[str, Sources]:
        """What each tensor of the model is made of; what belongs nowhere goes to `made`."""
        found: dict[str, Sources] = {}
        if not given:
            return found
        rename, converters = renamer(self.model, set(self.experts))
        for key, value in given.items():
            target, pattern = rename(key)[0]
            if pattern is not None and key in self.sizes and self._square(key):
                raise _refusal(self.model, [_ambiguous(key)])
            if target not in self.sizes or _row(key) >= self._rows(target, pattern):
                made[key] = value
                continue
            sources = found.setdefault(target, Sources())
            sources.converter = None if pattern is None else converters[pattern]
            sources.keys.setdefault(pattern or "", []).append(key)
        return found

    def _square(self, key: str) -> bool:
        """Whether the shape of an expert's tensor does not tell which way round it lies."""
        size = self.sizes[key]
        return key in self.experts and len(size) > 2 and size[-1] == size[-2]

    def _rows(self, target: str, pattern: str | None) -> float:
        """How many experts there may be, where the checkpoint numbers them."""
        numbered = pattern is not None and "*" in pattern and target in self.experts
        return self.sizes[target][0] if numbered else float("inf")

    def _make(self, target: str, sources: Sources, given: Mapping[str, Tensor]) -> dict[str, Given]:
        if sources.converter is None:
            return {target: given[sources.keys[""][-1]]}
        if sources.plain and target in self.experts:
            return {target: self._pieces(target, sources, given)}
        return self._convert(target, sources, given)

    def _pieces(self, target: str, sources: Sources, given: Mapping[str, Tensor]) -> Rows:
        """Experts one by one, as many as came: equal parts of an expert below each other."""
        n_experts, height, *width = self.sizes[target]
        patterns = sources.converter.source_patterns
        rows = Rows((n_experts, height, *width))
        part = height // len(patterns)
        wrong = []
        for pattern, keys in sources.keys.items():
            for key in keys:
                if given[key].shape == (part, *width):
                    rows.add(_row(key), patterns.index(pattern) * part, given[key])
                else:
                    wrong.append(_mismatch(key, given[key].shape, (part, *width)))
        if wrong:
            raise _refusal(self.model, wrong)
        return rows

    def _convert(
        self, target: str, sources: Sources, given: Mapping[str, Tensor]
    ) -> dict[str, Given]:
        """Runs the family's own converter, which needs all it is made of at once."""
        converter = deepcopy(sources.converter)
        for pattern, keys in sources.keys.items():
            for key in sorted(keys, key=_row):
                converter.add_tensor(target, key, pattern, given[key])
        try:
            made = converter.convert(
                target, model=_Sized(self.sizes[target]), config=self.model.config
            )
        except Exception as error:  # whatever its operations raise
            reason = " ".join(str(error).split())[:200]
            raise _refusal(self.model, [_incomplete(target, sources, reason)]) from error
        values = {n: v[0] if isinstance(v, list) else v for n, v in made.items()}
        for name, value in values.items():
            if name in self.sizes and tuple(value.shape) != self.sizes[name]:
                reason = f"they give {list(value.shape)}, not {list(self.sizes[name])}"
                raise _refusal(self.model, [_incomplete(name, sources, reason)])
        return values


class _Sized:
    """Stands for the model where a converter compares with the shape of its target."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self._shape, device="meta")


def _row(key: str) -> int:
    """The number of an expert in a name: the last one there."""
    numbers = re.findall(r"\.(\d+)\.", key)
    return int(numbers[-1]) if numbers else 0


def _check(
    model: nn.Module,
    prefix: str,
    sizes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Given],
) -> None:
    """Before anything is written: every tensor has its size."""
    wrong = [
        _mismatch(prefix + name, value.shape, sizes[name])
        for name, value in given.items()
        if name in sizes and tuple(value.shape) != sizes[name] and value.shape.numel() != 1
    ]
    if wrong:
        raise _refusal(model, wrong)


def _mismatch(name: str, came: torch.Size, expected: tuple[int, ...]) -> str:
    return (
        f"size mismatch for {name}: copying a param with shape {came} from checkpoint, the shape "
        f"in current model is {torch.Size(expected)}."
    )


def _ambiguous(name: str) -> str:
    return (
        f"{name} lies one way round in the model and the other in its checkpoints, and is square: "
        "the state dict may be of either; overspill.load(folder) reads a checkpoint."
    )


def _incomplete(target: str, sources: Sources, reason: str) -> str:
    came = sum(len(keys) for keys in sources.keys.values())
    return (
        f"{target} is made of {', '.join(sources.converter.source_patterns)}, all of them in one "
        f"state dict, and {came} came: {reason}; overspill.load(folder) reads them from any number "
        "of files."
    )


def _refusal(model: nn.Module, messages: list[str]) -> RuntimeError:
    """As torch says it."""
    return RuntimeError(
        f"Error(s) in loading state_dict for {type(model).__name__}:\n\t" + "\n\t".join(messages)
    )
