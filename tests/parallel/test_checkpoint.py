"""Checkpoints have the same bytes from any number of ranks, and any number can read them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import overspill
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from overspill.train import checkpoint
from overspill.train.checkpoint import TrainState
from tests.moe.oracle import Task, loss_of
from tests.parallel.processes import run_ranks

TASK = Task(n_layers=2)  # five experts
TOKENS = torch.arange(24).view(2, 12)
STATE = TrainState(3, 6, "digest", {"experts": 5})

Trained = tuple[GPTMoE, overspill.AdamW]


def new_model(mesh: DeviceMesh | None, **more: Any) -> Trained:
    model = TASK.model()
    where = {"mode": "host", "slots": 3, "device": "cpu", "gpu_experts": 1, **more}
    overspill.offload(model, quiet=True, settings=Settings(threads=1), mesh=mesh, **where)
    return model, overspill.AdamW(model, max_grad_norm=1.0)


def train(model: GPTMoE, optimizer: overspill.AdamW) -> float:
    loss = loss_of(model, TOKENS)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save(model: GPTMoE, optimizer: overspill.AdamW, folder: Path) -> Path:
    return checkpoint.save(folder, STATE, model, model.overspill, optimizer, keep=1)


def load_and_save(
    mesh: DeviceMesh, source: Path, folder: Path, **more: Any
) -> tuple[TrainState, float]:
    """The state of a checkpoint that is read and written again, and the loss of the next step."""
    model, optimizer = new_model(mesh, **more)
    state = checkpoint.load(source, model, model.overspill, optimizer)
    save(model, optimizer, folder)
    return state, train(model, optimizer)


def train_and_save(folder: Path) -> tuple[Path, float]:
    """The checkpoint of one process, and the loss of its next step."""
    model, optimizer = new_model(None)
    for _ in range(2):
        train(model, optimizer)
    source = save(model, optimizer, folder)
    return source, train(model, optimizer)


def assert_same_files(folder: Path, source: Path) -> None:
    (written,) = folder.iterdir()
    for file in source.iterdir():
        assert (written / file.name).read_bytes() == file.read_bytes(), file.name


def test_ranks_write_the_bytes_that_they_have_read(tmp_path: Path) -> None:
    source, loss = train_and_save(tmp_path / "1")
    folder = tmp_path / "3"  # two ranks and two nodes are in other files
    for state, next_loss in run_ranks(3, load_and_save, source, folder):
        assert state == STATE
        assert abs(next_loss - loss) < 1e-5
    assert_same_files(folder, source)


def load_dicts(
    mesh: DeviceMesh, weights: dict[str, Tensor], states: dict[str, object]
) -> list[tuple[float, float]]:
    """The next losses, also with dense parameters that ranks divide."""
    found = []
    for shard_dense in (False, True):
        model, optimizer = new_model(mesh, shard_dense=shard_dense)
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        found.append((train(model, optimizer), train(model, optimizer)))
    return found


def test_ranks_load_state_dicts_of_one_process() -> None:
    model, optimizer = new_model(None)
    train(model, optimizer)
    found = run_ranks(2, load_dicts, model.state_dict(), optimizer.state_dict())
    losses = train(model, optimizer), train(model, optimizer)
    for of_rank in found:
        torch.testing.assert_close(of_rank, [losses, losses], rtol=1e-5, atol=1e-6)
