"""The use of memory budgets by `offload`."""

import signal

import pytest
import torch

import overspill
from overspill.moe.engine import Engine
from tests.moe.oracle import N_EXPERTS, Task, adamw, loss_of


def experts_in_slots(engine: Engine) -> int:
    return sum(len(engine.compute.streamer.plan.slots(layer)) for layer in range(engine.n_layers))


@pytest.mark.parametrize("slots", [4, 3 * N_EXPERTS])
@pytest.mark.parametrize("kind", ["inference", "frozen experts", "training"])
def test_every_slot_holds_an_expert(kind: str, slots: int) -> None:
    task = Task(n_layers=4)
    model = task.model()
    if kind == "inference":
        model.eval()
    elif kind == "frozen experts":
        for layer in model.moe_layers():
            layer.requires_grad_(False)
    overspill.offload(model, device="cpu", quiet=True, mode="host", slots=slots)
    engine = model.overspill
    assert isinstance(engine, Engine)
    assert engine.placement.slots == slots
    optimizer = adamw(model, task) if kind == "training" else None
    for (tokens,) in task.batches():
        loss = loss_of(model, tokens)
        if kind != "inference":
            loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    assert experts_in_slots(engine) == slots
    engine.close()


def test_a_pending_interrupt_of_the_caller_is_left_alone() -> None:
    """A handler of the caller, which may only note the signal, sees Ctrl-C at once."""
    noted: list[int] = []

    def note(what: str, done: int, total: int) -> None:
        if not noted:
            signal.raise_signal(signal.SIGINT)
            assert noted == [signal.SIGINT]

    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        model = Task().model()
        overspill.offload(model, device="cpu", quiet=True, mode="host", slots=3, progress=note)
        assert noted
        with torch.no_grad():
            assert loss_of(model, next(Task().batches())[0]).isfinite()
    finally:
        signal.signal(signal.SIGINT, before)
    model.overspill.close()
