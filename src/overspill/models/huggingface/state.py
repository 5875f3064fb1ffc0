"""`load_state_dict` of an offloaded model with the names of a checkpoint on disk.

transformers' Trainer resumes by passing every shard of a checkpoint to `load_state_dict`, with the
names in the file. Experts may be separate there, names may differ, and tensors may be transposed.
Both the names of the file and those of the model are accepted, in any number of state dicts.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from overspill.models.huggingface.conversion import Sources, Target, find_sources
from overspill.moe.state_dict import PartialStack, dense_tensors, expert_sizes

Given = Tensor | PartialStack


def accept_checkpoint_names(model: nn.Module) -> None:
    """Make `model.load_state_dict` accept the names of a checkpoint as well as its own."""
    model.register_load_state_dict_pre_hook(_translate)


def _translate(model: nn.Module, state_dict: dict[str, Any], prefix: str, *other: object) -> None:
    """Replace the names of a checkpoint by the names of the model, before any tensor is loaded."""
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
    """Translation of the names of a checkpoint to the names of the model, whose tensors have
    `sizes`."""

    def __init__(self, model: Any, sizes: Mapping[str, tuple[int, ...]], experts: Any) -> None:
        self.model, self.sizes, self.experts = model, sizes, experts

    def translate(self, given: Mapping[str, Tensor]) -> dict[str, Given]:
        """Return the tensors by names of the model. Unknown names are kept; torch reports them as
        unexpected."""
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
        """Return the sources of each tensor of the model; unknown tensors are added to `made`."""

        def choose(key: str, targets: list[Target]) -> list[Target]:
            name, pattern = targets[0]  # its converter makes the other targets too
            if pattern is not None and key in self.sizes and self._square(key):
                raise _load_error(self.model, [_ambiguous(key)])
            if name in self.sizes and _expert(key) < self._n_experts(name, pattern):
                return targets[:1]
            made[key] = given[key]
            return []

        return find_sources(self.model, set(self.experts), given, choose) if given else {}

    def _square(self, key: str) -> bool:
        """Return whether the shape of an expert's tensor does not show if it is transposed."""
        size = self.sizes[key]
        return key in self.experts and len(size) > 2 and size[-1] == size[-2]

    def _n_experts(self, target: str, pattern: str | None) -> float:
        """Return the number of experts if the checkpoint numbers them, else infinity."""
        numbered = pattern is not None and "*" in pattern and target in self.experts
        return self.sizes[target][0] if numbered else float("inf")

    def _make(self, target: str, sources: Sources, given: Mapping[str, Tensor]) -> dict[str, Given]:
        if "" in sources.keys:
            return {target: given[sources.keys[""][-1]]}
        if sources.merges and target in self.experts:
            return {target: self._merge(target, sources, given)}
        return self._convert(target, sources, given)

    def _merge(self, target: str, sources: Sources, given: Mapping[str, Tensor]) -> PartialStack:
        """Return the given experts; each consists of equal parts, one below the other."""
        n_experts, height, *width = self.sizes[target]
        patterns = sources.converter.source_patterns
        stack = PartialStack((n_experts, height, *width))
        part = height // len(patterns)
        wrong = []
        for pattern, keys in sources.keys.items():
            for key in keys:
                if given[key].shape == (part, *width):
                    stack.add(_expert(key), patterns.index(pattern) * part, given[key])
                else:
                    wrong.append(_mismatch(key, given[key].shape, (part, *width)))
        if wrong:
            raise _load_error(self.model, wrong)
        return stack

    def _convert(
        self, target: str, sources: Sources, given: Mapping[str, Tensor]
    ) -> dict[str, Given]:
        """Run the family's converter, which needs all of its sources at once."""
        tensors = (
            (key, pattern, given[key])
            for pattern, keys in sources.keys.items()
            for key in sorted(keys, key=_expert)
        )
        try:
            made = sources.convert(target, tensors, self.sizes[target], self.model.config)
        except Exception as error:  # converters raise errors of any type
            reason = " ".join(str(error).split())[:200]
            raise _load_error(self.model, [_incomplete(target, sources, reason)]) from error
        for name, value in made.items():
            if name in self.sizes and tuple(value.shape) != self.sizes[name]:
                reason = f"they give {list(value.shape)}, not {list(self.sizes[name])}"
                raise _load_error(self.model, [_incomplete(name, sources, reason)])
        return dict(made)


def _expert(key: str) -> int:
    """Return the index of an expert: the last number in the name."""
    numbers = re.findall(r"\.(\d+)\.", key)
    return int(numbers[-1]) if numbers else 0


def _check(
    model: nn.Module,
    prefix: str,
    sizes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Given],
) -> None:
    """Raise if a tensor has a wrong size, before anything is written."""
    wrong = [
        _mismatch(prefix + name, value.shape, sizes[name])
        for name, value in given.items()
        if name in sizes and tuple(value.shape) != sizes[name] and value.shape.numel() != 1
    ]
    if wrong:
        raise _load_error(model, wrong)


def _mismatch(name: str, given: torch.Size, expected: tuple[int, ...]) -> str:
    return (
        f"size mismatch for {name}: copying a param with shape {given} from checkpoint, the shape "
        f"in current model is {torch.Size(expected)}."
    )


def _ambiguous(name: str) -> str:
    return (
        f"{name} is square and transposed in checkpoints: the state dict could be in either "
        "layout; overspill.load(folder) reads a checkpoint."
    )


def _incomplete(target: str, sources: Sources, reason: str) -> str:
    given = len(sources.all_keys)
    return (
        f"{target} is made of {', '.join(sources.converter.source_patterns)}, which must be in one "
        f"state dict; {given} of them are given: {reason}; overspill.load(folder) reads them from "
        "any number of files."
    )


def _load_error(model: nn.Module, messages: list[str]) -> RuntimeError:
    """Return the error of torch's load_state_dict."""
    return RuntimeError(
        f"Error(s) in loading state_dict for {type(model).__name__}:\n\t" + "\n\t".join(messages)
    )
