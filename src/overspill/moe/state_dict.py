"""State dicts of offloaded models, with the names and shapes of the plain model."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import BudgetError
from overspill.core.experts import ExpertId, ExpertShape
from overspill.core.sizes import format_size
from overspill.hardware.machine import available_memory
from overspill.moe.lazy_tensor import LazyTensor
from overspill.moe.placeholder import ExpertPlaceholder, OthersPlaceholder, Place, Places


class PartialStack:
    """Stands in a state dict for a stack of experts of which some pieces are given."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = torch.Size(shape)
        self._pieces: dict[int, list[tuple[int, Tensor]]] = {}

    def add(self, expert: int, start: int, piece: Tensor) -> None:
        """`piece` are the rows of the expert's tensor from `start` on."""
        self._pieces.setdefault(expert, []).append((start, piece))

    @property
    def complete(self) -> bool:
        given = sum(piece.numel() for pieces in self._pieces.values() for _, piece in pieces)
        return given == self.shape.numel()

    def __contains__(self, expert: int | None) -> bool:
        return expert in self._pieces

    def write(self, expert: int, part: Tensor) -> None:
        """Copy the pieces of an expert into its tensor."""
        for start, piece in self._pieces.get(expert, ()):
            part[start : start + len(piece)].copy_(piece)


def show_experts(module: nn.Module, attribute: str, places: Places, lazy: bool = False) -> None:
    """Make `module.state_dict()` contain the experts' tensors instead of the placeholder
    `attribute`, and `load_state_dict` accept them. They are copies; with `lazy` they are made on
    first use."""

    def save(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        placeholder: ExpertPlaceholder = getattr(module, attribute)
        placeholder.engine.check_whole("state_dict()")
        del state_dict[prefix + attribute]
        for name, tensor in _tensors(placeholder, places).items():
            state_dict[prefix + name] = tensor if lazy else tensor.detach()

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
        placeholder: ExpertPlaceholder | OthersPlaceholder = getattr(module, attribute)
        expected = stack_sizes(placeholder, places)
        given = {
            name: state_dict.pop(prefix + name) for name in expected if prefix + name in state_dict
        }
        state_dict[prefix + attribute] = placeholder  # torch expects a value for every parameter
        wrong = [
            f"size mismatch for {prefix}{name}: {tuple(value.shape)} is not {expected[name]}"
            for name, value in given.items()
            if value.shape != expected[name]
        ]
        error_msgs += wrong
        if strict:
            missing_keys += [prefix + name for name in expected if not _complete(given.get(name))]
        if given and not wrong and isinstance(placeholder, ExpertPlaceholder):
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
    """The state dict without the experts. `state_dict()` itself would copy all experts into
    memory."""
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


def all_placeholders(
    model: nn.Module,
) -> Iterator[tuple[str, ExpertPlaceholder | OthersPlaceholder, Places]]:
    """The path, placeholder and places of each module of a Hugging Face model with offloaded
    experts, here or on other ranks."""
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            is_one = isinstance(parameter, ExpertPlaceholder | OthersPlaceholder)
            if is_one and parameter.places is not None:
                yield path, parameter, parameter.places


def placeholders(model: nn.Module) -> Iterator[tuple[str, ExpertPlaceholder, Places]]:
    """The path of each module of a Hugging Face model whose experts are offloaded, here."""
    for path, parameter, places in all_placeholders(model):
        if isinstance(parameter, ExpertPlaceholder):
            yield path, parameter, places


def expert_sizes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all expert tensors in the state dict of a Hugging Face model."""
    return {
        f"{path}.{name}": size
        for path, placeholder, places in all_placeholders(model)
        for name, size in stack_sizes(placeholder, places).items()
    }


def stack_sizes(
    placeholder: ExpertPlaceholder | OthersPlaceholder, places: Places
) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's expert tensors in the plain model."""
    return tensor_sizes(placeholder.engine.shape, placeholder.engine.n_experts, places)


def tensor_sizes(shape: ExpertShape, n_experts: int, places: Places) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors, by name, that hold the experts of a layer."""
    return {
        place.name: size if place.expert is None else (n_experts, *size)
        for index in range(n_experts)
        for place, size in zip(places(index), shape.sizes, strict=True)
    }


def _complete(value: Tensor | PartialStack | None) -> bool:
    return value.complete if isinstance(value, PartialStack) else value is not None


def _tensors(placeholder: ExpertPlaceholder, places: Places) -> dict[str, LazyTensor]:
    """The experts' tensors of the plain model, read from the engine on first use."""
    owners: dict[str, list[tuple[int, int]]] = {}
    for index in range(placeholder.engine.n_experts):
        for position, place in enumerate(places(index)):
            owners.setdefault(place.name, []).append((index, position))

    def tensor(name: str, size: tuple[int, ...]) -> LazyTensor:
        def read() -> Tensor:
            return _read(placeholder, places, size, owners[name])

        return LazyTensor(size, placeholder.engine.dtype, read)

    return {name: tensor(name, size) for name, size in stack_sizes(placeholder, places).items()}


def _read(
    placeholder: ExpertPlaceholder,
    places: Places,
    size: tuple[int, ...],
    owners: Sequence[tuple[int, int]],
) -> Tensor:
    """One tensor; `owners` are its experts and its position in their records."""
    engine = placeholder.engine
    need, free = torch.Size(size).numel() * engine.dtype.itemsize, available_memory()
    if need > free:
        raise BudgetError(
            f"a state dict copies experts: one tensor of layer {placeholder.layer} needs "
            f"{format_size(need)}, and {format_size(free)} is free; overspill.save(model, folder) "
            "streams them"
        )
    if engine.can_train:
        engine.training.check_between_steps("saved")
    engine.flush()
    copy = torch.empty(size, dtype=engine.dtype)
    record = torch.empty(engine.shape.numel, dtype=engine.dtype)
    for index, position in owners:
        engine.records.read_weights(ExpertId(placeholder.layer, index), record)
        part = split_record(record, engine.shape)[position]
        places(index)[position].of(copy).copy_(part)
    return copy


def _load(
    placeholder: ExpertPlaceholder, places: Places, given: dict[str, Tensor | PartialStack]
) -> None:
    engine = placeholder.engine
    engine.flush()
    if engine.can_train:
        engine.training.weights_loaded(placeholder.layer)
    for index in engine.experts.local_ids:

        def fill(record: Tensor, index: int = index) -> None:
            parts = split_record(record, engine.shape)
            for place, part in zip(places(index), parts, strict=True):
                value = given.get(place.name)
                if isinstance(value, PartialStack):
                    assert place.expert is not None
                    value.write(place.expert, part)
                elif value is not None:
                    part.copy_(place.of(value))

        # values may be read from an engine, whose lock comes before that of the store
        if any(_has(given, place) for place in places(index)):
            with engine.exclusive():
                engine.records.write_weights(ExpertId(placeholder.layer, index), fill)


def _has(given: dict[str, Tensor | PartialStack], place: Place) -> bool:
    value = given.get(place.name)
    return place.expert in value if isinstance(value, PartialStack) else value is not None
