"""The popularity predictor of a model: its first weights, and the file that keeps its learned
weights beside the profile of the machine."""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.hardware.native import cache_folder
from overspill.models.pregate import find_chains
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.moe.predictor import Gate, Observer, Predictor

_log = logging.getLogger("overspill")
_FORMAT = "1"
_SAMPLE = 16
"""Number of elements of each dense parameter that identify a checkpoint."""


class _Gates(NamedTuple):
    of_layers: list[Gate | None]
    starts: list[int]
    """First layer of each stack: of an encoder, of a decoder."""


def new_observer(model: Any, distances: Sequence[int]) -> Observer:
    """Make a predictor for an offloaded model that learns from its passes. It begins with the
    weights saved for this checkpoint, or with the model's gates."""
    engine = model.overspill
    gates = _find_gates(model)
    predictor = Predictor(
        gates.of_layers, engine.n_experts, engine.shape.d_model, engine.device, distances
    )
    _load(predictor, predictor_file(model))
    return Observer(predictor, gates.starts)


def predictor_file(model: Any) -> Path:
    """Return the file of a checkpoint, which dense weights identify, whatever its folder."""
    engine = model.overspill
    digest = hashlib.sha256(f"{engine.n_layers} {engine.n_experts} {engine.shape}".encode())
    samples = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ExpertPlaceholder) or not parameter.numel():
            continue
        digest.update(f"{name} {list(parameter.shape)}".encode())
        every = max(1, parameter.numel() // _SAMPLE)
        samples.append(parameter.detach().flatten()[::every][:_SAMPLE].float())
    if samples:
        digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return cache_folder() / f"predictor-{digest.hexdigest()[:16]}.safetensors"


def save_predictor(model: Any, predictor: Predictor) -> None:
    """Write the learned weights. If the file cannot be written, they are lost, with a line in the
    log."""
    from safetensors.torch import save_file

    path = predictor_file(model)
    aside = path.with_suffix(f".{os.getpid()}.part")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in predictor.tensors().items()}
    facts = {"format": _FORMAT, "learned_tokens": str(predictor.learned_tokens)}
    try:
        save_file(tensors, aside, facts)
        os.replace(aside, path)
    except Exception as error:  # safetensors raises its own kind for a full disk
        _log.warning("the popularity predictor could not be saved to %s: %r", path, error)
    finally:
        aside.unlink(missing_ok=True)


def _load(predictor: Predictor, path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return
    try:
        with safe_open(path, framework="pt") as file:
            facts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        if facts.get("format") != _FORMAT:
            raise ValueError(f"format {facts.get('format')}")
        predictor.load(tensors, int(facts["learned_tokens"]))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        _log.warning("the popularity predictor %s cannot be read (%r) and is ignored", path, error)


def _find_gates(model: Any) -> _Gates:
    engine = model.overspill
    gates = _Gates([None] * engine.n_layers, [])
    shape = engine.n_experts, engine.shape.d_model
    try:
        chains = find_chains(model)
    except ConfigError as error:
        _log.info("the popularity predictor starts without gates: %s", error)
        return gates
    for chain in chains:
        layers = []
        for block in chain:
            placeholders = [
                p for p in block.experts.parameters() if isinstance(p, ExpertPlaceholder)
            ]
            if len(placeholders) == 1:
                layers.append(placeholders[0].layer)
                gates.of_layers[layers[-1]] = _read_gate(block.gate, shape)
        if layers:
            gates.starts.append(min(layers))
    return gates


def _read_gate(gate: nn.Module, shape: tuple[int, int]) -> Gate | None:
    """Return the weight and the bias of the product that a gate computes; None if it has no single
    one."""
    weights = [p for p in gate.parameters() if tuple(p.shape) == shape]
    biases = [p for name, p in gate.named_parameters() if _is_bias(name, p, shape[0])]
    if len(weights) != 1 or len(biases) > 1:
        return None
    return Gate(weights[0].detach(), biases[0].detach() if biases else None)


def _is_bias(name: str, parameter: Tensor, n_experts: int) -> bool:
    return name.rpartition(".")[2] == "bias" and tuple(parameter.shape) == (n_experts,)
