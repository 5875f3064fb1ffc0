"""The optimizer states of offloaded experts, as state dicts have them: one entry for each layer."""

from typing import Any

import torch

from overspill.core.experts import ExpertId
from overspill.optim.interfaces import ExpertEngine


def state_sections(engine: ExpertEngine) -> list[tuple[str, torch.dtype]]:
    """Name and dtype of each optimizer state of an expert; frozen experts have none."""
    if not engine.training.optimizer.has_states:
        return []
    return [(section.name, section.dtype) for section in engine.layout.sections]


def layer_steps(engine: ExpertEngine) -> list[int]:
    """Return the number of updates of the experts of each layer."""
    return [engine.training.optimizer.steps(layer) for layer in range(engine.n_layers)]


def steps_of_all_layers(engine: ExpertEngine) -> list[int]:
    """Return the number of updates of each layer, also of other ranks; all ranks call this."""
    layers = engine.layer_map
    own = dict(zip(layers.own, layer_steps(engine), strict=True))
    if not layers.is_whole:
        assert engine.ranks is not None
        own = {layer: n for found in engine.ranks.gather(own) for layer, n in found.items()}
    return [own[layer] for layer in range(layers.n_layers)]


def read_layer(engine: ExpertEngine, layer: int) -> dict[str, Any]:
    """Return the states of a layer's experts as stacked [E, numel] tensors, and their steps."""
    entry: dict[str, Any] = {"step": engine.training.optimizer.steps(layer)}
    for name, dtype in state_sections(engine):
        stack = torch.empty(engine.n_experts, engine.layout.shape.numel, dtype=dtype)
        for index in range(engine.n_experts):
            engine.records.read_state(ExpertId(layer, index), name, stack[index])
        entry[name] = stack
    return entry


def load_layer(engine: ExpertEngine, layer: int, entry: dict[str, Any]) -> None:
    """Set the states of a layer's experts; states that are not in `entry` become zero."""
    training = engine.training
    if entry["step"] == 0 and training.optimizer.is_fresh(layer):
        return
    training.optimizer.allocate_states()
    training.optimizer.set_steps(layer, int(entry["step"]))
    for name, _ in state_sections(engine):
        stack = entry.get(name, torch.zeros(()).expand(engine.n_experts))
        for index in engine.experts.local_ids:
            engine.records.write_state(ExpertId(layer, index), name, stack[index])
