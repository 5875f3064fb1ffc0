"""Eager transformers against the same model with its experts offloaded."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import overspill
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.state_dict import split_record

# Adam's first step has the size of the learning rate whatever the gradient; a larger eps lets
# gradients that are zero but for rounding (the bias of a key, for one) move nothing
ADAM = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-4}
MODES: dict[str, dict[str, Any]] = {
    "gpu": {"mode": "gpu"},
    "host": {"mode": "host", "slots": 3},
    "disk": {"mode": "disk", "slots": 2, "host_slots": 3},
}


def budgets(mode: str, folder: Path) -> dict[str, Any]:
    given = dict(MODES[mode], device="cpu", quiet=True, progress=False)
    return given | ({"disk": folder} if mode == "disk" else {})


@contextmanager
def offloaded(model: Any, mode: str, folder: Path) -> Iterator[Any]:
    """A copy of `model` whose experts are with an engine."""
    twin = overspill.offload(copy.deepcopy(model), **budgets(mode, folder))
    try:
        yield twin
    finally:
        twin.overspill.close()


def catch_gradients(model: Any) -> dict[str, Tensor]:
    """Fills with the gradients of the experts, under the names of the plain model, when they are
    delivered."""
    engine = model.overspill
    placeholders = {
        module.overspill.layer: (path, module.overspill.places)
        for path, module in model.named_modules()
        if hasattr(module, "overspill") and module is not model
    }
    caught: dict[str, Tensor] = {}
    deliver = engine.training.deliver

    def catch(layer: int, number: int, parts: Any) -> None:
        path, places = placeholders[layer]
        for place, part in zip(places(number), parts, strict=True):
            shape = part.shape if place.expert is None else (engine.n_experts, *part.shape)
            whole = caught.setdefault(f"{path}.{place.name}", torch.zeros(shape))
            mine = place.of(whole)
            mine += part

    def watch(layer_pass: LayerPass, wave: Wave, dw: Any) -> None:
        for number in range(wave.first, wave.stop):
            catch(layer_pass.layer, number, [part[number - wave.first] for part in dw])
        deliver(layer_pass, wave, dw)

    engine.training.deliver = watch
    return caught


def assert_same_gradients(plain: Any, twin: Any, caught: dict[str, Tensor]) -> None:
    mine = {name: p.grad for name, p in twin.named_parameters()} | caught
    checked = 0
    for name, parameter in plain.named_parameters():
        theirs = parameter.grad
        if theirs is None:  # an expert without tokens in a dictionary
            assert mine.get(name) is None or not mine[name].any(), name
            continue
        if name not in mine:  # no expert of the stack had a token
            assert not theirs.any(), name
            continue
        torch.testing.assert_close(
            mine[name], theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()) + 1e-7, msg=name
        )
        checked += 1
    assert checked > len(caught)


def assert_same_weights(plain: Any, twin: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    theirs, mine = plain.state_dict(), twin.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=rtol, atol=atol, msg=name)


def expert_weights(model: Any, path: str, index: int) -> list[Tensor]:
    """The tensors of one expert as they lie in the store."""
    engine = model.overspill
    placeholder = model.get_submodule(path).overspill
    record = torch.empty(engine.shape.numel, dtype=engine.dtype)
    engine.records.read_weights(overspill.core.experts.ExpertId(placeholder.layer, index), record)
    return split_record(record, engine.shape)
