"""Experts that would move by themselves stay in place while copies of them use the memory."""

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.serve.runners import Runner
from tests.models.huggingface.oracle import offloaded
from tests.moe.fake_memory import FakeMemory
from tests.serve.models import plain_gpt

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    """Its experts are in host memory, and the device has room for all of them."""
    with offloaded(copy.deepcopy(plain_gpt()), "host", tmp_path) as twin:
        twin.overspill.memory.fill(FakeMemory(twin.overspill, other=1 << 16), 1 << 30)
        yield twin


def runner_of(model: Any) -> Runner:
    from overspill.serve.fused_runner import FusedRunner

    return FusedRunner(model, torch.device("cpu"), 8, 16, 64, 2)


def move(model: Any) -> bool:
    """Whether experts have moved to the device after some passes."""
    with torch.no_grad():
        for _ in range(6):
            model(torch.tensor([[1, 2, 3]]))
    return sum(model.overspill.residents) > 0


def test_experts_move_when_the_last_runner_is_closed(model: Any) -> None:
    runners = [runner_of(model) for _ in range(2)]
    for runner in runners:
        assert not move(model)
        runner.close()
    runners[0].close()
    assert move(model)


def test_a_closed_runner_has_no_memory_for_keys_and_values(model: Any) -> None:
    runner = runner_of(model)
    assert runner.cache_bytes > 0
    runner.close()
    assert runner.cache_bytes == 0


def test_experts_move_when_a_runner_is_given_up(model: Any) -> None:
    runner = runner_of(model)
    assert not move(model)
    del runner
    assert move(model)


def test_experts_move_if_steps_cannot_compute_the_model(model: Any) -> None:
    model.blocks[0].register_forward_hook(lambda *_: None)
    runner = runner_of(model)
    assert move(model)
    runner.close()
