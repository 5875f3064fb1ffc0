"""The names and shapes of a plain model in state dicts, though its experts are with an engine."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overspill.core.errors import BudgetError
from overspill.core.experts import ExpertId, ExpertShape
from overspill.core.sizes import format_size
from overspill.hardware.machine import available_memory
from overspill.moe.engine import ExpertPlaceholder


class Place(NamedTuple):
    """Where one tensor of an expert lies in the plain model."""

    name: str
    row: int | None
    """Its row in a stack of all experts; None: the tensor is this expert's alone."""


Places = Callable[[int], Sequence[Place]]
"""The places of an expert's tensors, in the order of its record."""


def stacked(names: Sequence[str]) -> Places:
    return lambda index: [Place(name, index) for name in names]


def show_experts(module: nn.Module, attribute: str, places: Places) -> None:
    """Lets `module.state_dict()` hold the experts' tensors in the place of the placeholder
    `attribute`, and `load_state_dict` take them."""

    def save(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        placeholder: ExpertPlaceholder = getattr(module, attribute)
        del state_dict[prefix + attribute]
        for name, value in _copies(placeholder, places):
            state_dict[prefix + name] = value

    def load(
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        placeholder: ExpertPlaceholder = getattr(module, attribute)
        expected = _sizes(placeholder, places)
        given = {
            name: state_dict.pop(prefix + name) for name in expected if prefix + name in state_dict
        }
        state_dict[prefix + attribute] = placeholder  # torch shall find what it looks for
        wrong = [
            f"size mismatch for {prefix}{name}: {tuple(value.shape)} is not {expected[name]}"
            for name, value in given.items()
            if value.shape != expected[name]
        ]
        error_msgs += wrong
        if strict:
            missing_keys += [prefix + name for name in expected if name not in given]
        if given and not wrong:
            _load(placeholder, places, given)

    module.register_state_dict_post_hook(save)
    module.register_load_state_dict_pre_hook(load)


def split_record(record: Tensor, shape: ExpertShape) -> list[Tensor]:
    """Views of the tensors in one flat record."""
    return [
        record[start : start + torch.Size(size).numel()].view(size)
        for start, size in zip(shape.starts, shape.sizes, strict=True)
    ]


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All that a state_dict holds but the experts, under the same names.

    `state_dict()` itself would copy every expert into memory at once.
    """
    dense: dict[str, Tensor] = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not hasattr(parameter, "is_expert_placeholder")
    }
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                dense[name] = buffer
    return dense


def _sizes(placeholder: ExpertPlaceholder, places: Places) -> dict[str, tuple[int, ...]]:
    engine = placeholder.engine
    return {
        place.name: size if place.row is None else (engine.n_experts, *size)
        for index in range(engine.n_experts)
        for place, size in zip(places(index), engine.shape.sizes, strict=True)
    }


def _copies(placeholder: ExpertPlaceholder, places: Places) -> Iterator[tuple[str, Tensor]]:
    engine = placeholder.engine
    need, free = engine.n_experts * engine.layout.weight_bytes, available_memory()
    if need > free:
        raise BudgetError(
            f"state_dict() copies every expert, {format_size(need)} for layer {placeholder.layer} "
            f"alone, and {format_size(free)} is free; overspill.save(model, folder) streams them"
        )
    engine.flush()
    copies = {
        name: torch.empty(size, dtype=engine.dtype)
        for name, size in _sizes(placeholder, places).items()
    }
    record = torch.empty(engine.shape.numel, dtype=engine.dtype)
    for index in range(engine.n_experts):
        engine.read_weights(ExpertId(placeholder.layer, index), record)
        for place, part in zip(places(index), split_record(record, engine.shape), strict=True):
            copy = copies[place.name]
            (copy if place.row is None else copy[place.row]).copy_(part)
    yield from copies.items()


def _load(placeholder: ExpertPlaceholder, places: Places, given: dict[str, Tensor]) -> None:
    engine = placeholder.engine
    engine.flush()
    for index in range(engine.n_experts):

        def fill(record: Tensor, index: int = index) -> None:
            parts = split_record(record, engine.shape)
            for place, part in zip(places(index), parts, strict=True):
                if place.name in given:
                    value = given[place.name]
                    part.copy_(value if place.row is None else value[place.row])

        if any(place.name in given for place in places(index)):
            engine.write_weights(ExpertId(placeholder.layer, index), fill)
