"""The names and shapes of a plain model in state dicts, though its experts are with an engine."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overspill.core.errors import BudgetError
from overspill.core.experts import ExpertId, ExpertShape
from overspill.core.sizes import format_size
from overspill.hardware.machine import available_memory
from overspill.moe.late_tensor import LateTensor
from overspill.moe.placeholder import ExpertPlaceholder


class Place(NamedTuple):
    """Where one tensor of an expert lies in the plain model."""

    name: str
    row: int | None
    """Its row in a stack of all experts; None: the tensor is this expert's alone."""


Places = Callable[[int], Sequence[Place]]
"""The places of an expert's tensors, in the order of its record."""


def stacked(names: Sequence[str]) -> Places:
    return lambda index: [Place(name, index) for name in names]


class Rows:
    """Stands in a state dict for a stack of experts that came in pieces, any of which may be
    missing."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = torch.Size(shape)
        self._pieces: dict[int, list[tuple[int, Tensor]]] = {}

    def add(self, row: int, start: int, piece: Tensor) -> None:
        """`piece` is what expert `row` has from its own row `start` on."""
        self._pieces.setdefault(row, []).append((start, piece))

    @property
    def complete(self) -> bool:
        came = sum(piece.numel() for row in self._pieces.values() for _, piece in row)
        return came == self.shape.numel()

    def __contains__(self, row: int | None) -> bool:
        return row in self._pieces

    def write(self, row: int, part: Tensor) -> None:
        for start, piece in self._pieces.get(row, ()):
            part[start : start + len(piece)].copy_(piece)


def show_experts(module: nn.Module, attribute: str, places: Places, late: bool = False) -> None:
    """Lets `module.state_dict()` hold the experts' tensors in the place of the placeholder
    `attribute`, and `load_state_dict` take them. They are copies, made when they are asked for;
    with `late`, when somebody looks at their numbers."""

    def save(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
    ) -> None:
        placeholder: ExpertPlaceholder = getattr(module, attribute)
        del state_dict[prefix + attribute]
        for name, tensor in _tensors(placeholder, places).items():
            state_dict[prefix + name] = tensor if late else tensor.detach()

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
            missing_keys += [
                prefix + name
                for name in expected
                if name not in given or (isinstance(given[name], Rows) and not given[name].complete)
            ]
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


def expert_sizes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors that `show_experts` shows, by their names in the model's state
    dict."""
    return {
        f"{path}.{name}": size
        for path, module in model.named_modules()
        for parameter in module._parameters.values()
        if isinstance(parameter, ExpertPlaceholder) and parameter.places is not None
        for name, size in _sizes(parameter, parameter.places).items()
    }


def _sizes(placeholder: ExpertPlaceholder, places: Places) -> dict[str, tuple[int, ...]]:
    engine = placeholder.engine
    return {
        place.name: size if place.row is None else (engine.n_experts, *size)
        for index in range(engine.n_experts)
        for place, size in zip(places(index), engine.shape.sizes, strict=True)
    }


def _tensors(placeholder: ExpertPlaceholder, places: Places) -> dict[str, LateTensor]:
    """The experts' tensors as the plain model has them, to be read from the engine."""
    owners: dict[str, list[tuple[int, int]]] = {}
    for index in range(placeholder.engine.n_experts):
        for position, place in enumerate(places(index)):
            owners.setdefault(place.name, []).append((index, position))

    def tensor(name: str, size: tuple[int, ...]) -> LateTensor:
        def read() -> Tensor:
            return _read(placeholder, places, size, owners[name])

        return LateTensor(size, placeholder.engine.dtype, read)

    return {name: tensor(name, size) for name, size in _sizes(placeholder, places).items()}


def _read(
    placeholder: ExpertPlaceholder,
    places: Places,
    size: tuple[int, ...],
    owners: Sequence[tuple[int, int]],
) -> Tensor:
    """One tensor; `owners` are the experts it is of and its position among their tensors."""
    engine = placeholder.engine
    need, free = torch.Size(size).numel() * engine.dtype.itemsize, available_memory()
    if need > free:
        raise BudgetError(
            f"a state dict copies experts, {format_size(need)} for one tensor of layer "
            f"{placeholder.layer}, and {format_size(free)} is free; overspill.save(model, folder) "
            "streams them"
        )
    engine.flush()
    copy = torch.empty(size, dtype=engine.dtype)
    record = torch.empty(engine.shape.numel, dtype=engine.dtype)
    for index, position in owners:
        engine.records.read_weights(ExpertId(placeholder.layer, index), record)
        row = places(index)[position].row
        part = split_record(record, engine.shape)[position]
        (copy if row is None else copy[row]).copy_(part)
    return copy


def _load(placeholder: ExpertPlaceholder, places: Places, given: dict[str, Tensor | Rows]) -> None:
    engine = placeholder.engine
    engine.flush()
    for index in range(engine.n_experts):

        def fill(record: Tensor, index: int = index) -> None:
            parts = split_record(record, engine.shape)
            for place, part in zip(places(index), parts, strict=True):
                value = given.get(place.name)
                if isinstance(value, Rows):
                    assert place.row is not None
                    value.write(place.row, part)
                elif value is not None:
                    part.copy_(value if place.row is None else value[place.row])

        if any(_has(given, place) for place in places(index)):
            engine.records.write_weights(ExpertId(placeholder.layer, index), fill)


def _has(given: dict[str, Tensor | Rows], place: Place) -> bool:
    value = given.get(place.name)
    return place.row in value if isinstance(value, Rows) else value is not None
