"""Eager transformers against the same model with its experts offloaded."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import overspill
from overspill.core.experts import ExpertId
from overspill.moe.state_dict import placeholders, split_record

# Adam's first step has the size of the learning rate for any gradient; with a larger eps, gradients
# that are zero but for rounding (of the bias of a key, for example) have no effect
ADAM = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-4}
MODES: dict[str, dict[str, Any]] = {
    "gpu": {"mode": "gpu"},
    "host": {"mode": "host", "slots": 3},
    "disk": {
        "mode": "disk",
        "slots": 2,
        "host_slots": 3,
        "gpu_experts": 2,
        "dense_weights": "host",
    },
}


def budgets(mode: str, folder: Path) -> dict[str, Any]:
    given = dict(MODES[mode], device="cpu", quiet=True, progress=False)
    return given | ({"disk": folder} if mode == "disk" else {})


@contextmanager
def offloaded(
    model: Any, mode: str, folder: Path, settings: overspill.Settings | None = None
) -> Iterator[Any]:
    """A copy of `model` with offloaded experts."""
    given = budgets(mode, folder)
    twin = overspill.offload(copy.deepcopy(model), settings=settings, **given)
    try:
        yield twin
    finally:
        twin.overspill.close()


def expert_gradients(model: Any, optimizer: overspill.AdamW) -> dict[str, Tensor]:
    """The gradients of the experts after the first step, with the names of the plain model: the
    first moment is then the gradient times 1 - beta1."""
    engine = model.overspill
    engine.flush()  # updates run in the background
    (beta1, _) = optimizer.param_groups[0]["betas"]
    moment = torch.empty(engine.shape.numel)
    found: dict[str, Tensor] = {}
    for path, placeholder, places in placeholders(model):
        for index in range(engine.n_experts):
            optimizer.read_expert_state(ExpertId(placeholder.layer, index), "exp_avg", moment)
            parts = split_record(moment / (1 - beta1), engine.shape)
            for place, part in zip(places(index), parts, strict=True):
                shape = part.shape if place.expert is None else (engine.n_experts, *part.shape)
                whole = found.setdefault(f"{path}.{place.name}", torch.empty(shape))
                place.of(whole).copy_(part)
    return found


def assert_same_gradients(
    plain: Any, twin: Any, experts: dict[str, Tensor], rounding: float = 1e-5
) -> None:
    """`experts` are the gradients of the twin's experts; without any, they are frozen. `rounding`
    is relative to the largest element of a gradient."""
    mine = {name: p.grad for name, p in twin.named_parameters()} | experts
    for name, parameter in plain.named_parameters():
        theirs = parameter.grad
        if theirs is None:
            assert mine.get(name) is None, name
            continue
        torch.testing.assert_close(
            mine[name],
            theirs,
            rtol=1e-5,
            atol=rounding * float(theirs.abs().max()) + 1e-7,
            msg=name,
        )


def assert_same_weights(plain: Any, twin: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    theirs, mine = plain.state_dict(), twin.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=rtol, atol=atol, msg=name)
