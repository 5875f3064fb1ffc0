"""Numbers of downloads of gradients: sums over the micro-batches of a stage stay on the device."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from tests.moe.fake_memory import FakeMemory
from tests.moe.oracle import N_EXPERTS, Task, adamw, spilled, weights_of
from tests.slow import slow_rows

LAYERS, STAGES, COUNT = 2, 2, 3
OTHER = 1 << 16
"""Bytes of activations."""


def step(
    model: Any, stages: overspill.Stages, optimizer: overspill.AdamW, batches: list[Tensor]
) -> Counter[str]:
    """The downloads of each expert in a step."""
    recorder = model.overspill.recorder
    recorder.start()
    inputs = [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in batches]
    stages.backward(inputs, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    model.overspill.flush()
    recorder.stop()
    names = [span.name for span in recorder.spans() if span.row == "download"]
    recorder.clear()
    return Counter(name for name in names if name.startswith("expert"))


def run(
    task: Task, sums: int | None, folder: Path
) -> tuple[list[Counter[str]], dict[str, Tensor], int]:
    """Downloads of each step, the weights at the end and the sums that the device has room for.
    With `sums` the budget of the device has room for so many; None: there is no budget."""
    model: Any = task.model()
    with spilled(model, "host with 5 slots", folder) as engine:
        stages = overspill.Stages(model, STAGES)
        optimizer = adamw(model, task)
        budget = None
        if sums is not None:
            memory = FakeMemory(engine, OTHER)
            room = sums * engine.layout.weight_bytes + OTHER // 10
            budget = int((memory.peak() + room) / 0.98)
            engine.memory.fill(memory, budget)
        found = []
        for batches in task.batches():
            found.append(step(model, stages, optimizer, batches))
            if budget is not None:
                assert memory.peak() <= budget
        return found, weights_of(model), engine.memory.share.gradients


@pytest.mark.parametrize(
    ("clip", "dtype"),
    slow_rows([(None, torch.float32), (0.3, torch.float32), (None, torch.bfloat16)], 1, 2),
)
def test_a_gradient_is_downloaded_once_per_step_where_the_device_has_room_for_a_stage(
    clip: float | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """From the fifth step on: memory is observed before."""
    task = Task(
        n_layers=LAYERS, micro_batches=COUNT, clip=clip, steps=6, tied=False, dtype=dtype
    )  # fmt: skip
    before, expected, none = run(task, None, tmp_path)
    assert none == 0
    assert max(before[-1].values()) == COUNT, "without room, once for each micro-batch"
    found, weights, sums = run(task, LAYERS // STAGES * N_EXPERTS, tmp_path)
    assert sums == LAYERS // STAGES * N_EXPERTS, "of one stage, not of the whole model"
    assert found[0] == before[0]
    assert set(found[-1]) == set(before[-1])
    assert set(found[-1].values()) == {1}
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.slow
def test_less_room_holds_some_sums(tmp_path: Path) -> None:
    task = Task(n_layers=LAYERS, micro_batches=COUNT, steps=6, tied=False)
    before, expected, _ = run(task, None, tmp_path)
    found, weights, sums = run(task, 3, tmp_path)
    assert sums == 3
    assert found[-1].total() <= before[-1].total() - (COUNT - 1) * sums
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
