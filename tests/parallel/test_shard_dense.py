"""Ranks that divide the dense parameters too train as one process with the batches of all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import overspill
from overspill.core.errors import ConfigError
from overspill.parallel.sharded import is_sharded, local
from tests.moe.oracle import Task, loss_of
from tests.parallel import test_huggingface as huggingface
from tests.parallel.processes import run_ranks
from tests.parallel.test_checkpoint import (
    assert_same_files,
    load_and_save,
    save,
    train,
    train_and_save,
)
from tests.parallel.training import Case, assert_follows, offload, plain, train_rank

TASK = Task(n_layers=2, lr=1e-3, steps=5)
SHARDED: dict[str, Any] = {"shard_dense": True}
HOST = {"mode": "host", "slots": 2, **SHARDED}

CASES = {
    "clipped, accumulation, recomputed blocks, uneven": Case(
        replace(TASK, clip=0.5, micro_batches=2, checkpoint=True), uneven=True, where=HOST
    ),
    "an expert without tokens": Case(replace(TASK, starve=True), where={"mode": "gpu", **SHARDED}),
}


def parts(mesh: DeviceMesh) -> tuple[int, int]:
    """Elements of this rank's dense weights, gradients and states, and of the whole weights."""
    model = TASK.model()
    offload(model, mesh, **SHARDED)
    optimizer = overspill.AdamW(model)
    loss_of(model, torch.arange(24).view(2, 12)).backward()
    optimizer.step()
    dense = [p for p in model.parameters() if not hasattr(p, "is_expert_placeholder")]
    assert all(is_sharded(p) for p in dense)
    own = [t for p in dense for t in (p.detach(), p.grad, *list(optimizer.state[p].values())[1:])]
    found = sum(local(tensor).numel() for tensor in own if tensor is not None)
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match="cannot get pre-gates"):
        overspill.pregate(model)
    return found, sum(p.numel() for p in dense)


def save_bf16(mesh: DeviceMesh, folder: Path, **options: Any) -> None:
    """Three steps in bf16, whose optimizer states have low bits, and a checkpoint."""
    model = replace(TASK, dtype=torch.bfloat16).model()
    offload(model, mesh, **options)
    optimizer = overspill.AdamW(model, lr=1e-2)
    for _ in range(3):
        train(model, optimizer)
    torch.manual_seed(0)  # its state is in the checkpoint
    save(model, optimizer, folder)


def refused(mesh: DeviceMesh) -> list[str]:
    """What is raised for what cannot be divided."""
    pregated = overspill.pregate(TASK.model())
    mixed = TASK.model()
    mixed.blocks[1].attention.bfloat16()
    tied = TASK.model()
    tied.norm.weight = tied.blocks[0].feed_norm.weight
    attempts: list[tuple[Any, dict[str, Any]]] = [
        (pregated, {}),
        (mixed, {}),
        (tied, {}),
        (TASK.model(), {"dense_weights": "host"}),
    ]
    found = []
    for model, options in attempts:
        with pytest.raises(ConfigError) as error:
            offload(model, mesh, **SHARDED, **options)
        found.append(str(error.value))
    return found


def work(mesh: DeviceMesh, source: Path, folder: Path) -> dict[str, Any]:
    """What one rank finds, by test."""
    found: dict[str, Any] = {name: train_rank(mesh, case) for name, case in CASES.items()}
    found["parts"] = parts(mesh)
    found["refused"] = refused(mesh)
    found["checkpoint"] = load_and_save(mesh, source, folder / "two", **SHARDED)
    save_bf16(mesh, folder / "bf16")
    save_bf16(mesh, folder / "bf16-sharded", **SHARDED)
    found["mixtral"] = huggingface.train_rank(mesh, "mixtral", **SHARDED)
    huggingface.make_and_save(mesh, folder / "saved", **SHARDED)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> tuple[Path, float]:
    return train_and_save(folder / "one")


@pytest.fixture(scope="module")
def ranks(folder: Path, checkpoint: tuple[Path, float]) -> list[dict[str, Any]]:
    found = run_ranks(2, work, checkpoint[0], folder)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@pytest.mark.parametrize("name", CASES)
def test_ranks_follow_plain_training(name: str, ranks: list[dict[str, Any]]) -> None:
    assert_follows([found[name] for found in ranks], plain(CASES[name]))


def test_each_rank_holds_a_part_of_weights_gradients_and_states(
    ranks: list[dict[str, Any]],
) -> None:
    (first, total), (second, _) = (found["parts"] for found in ranks)
    assert first + second == 4 * total
    assert first < 2.2 * total


def test_ranks_follow_eager_transformers(ranks: list[dict[str, Any]]) -> None:
    wanted = huggingface.plain("mixtral")
    huggingface.assert_follow_plain(wanted, [found["mixtral"] for found in ranks])


def test_checkpoints_and_saved_models_have_the_bytes_of_one_process(
    folder: Path, checkpoint: tuple[Path, float], ranks: list[dict[str, Any]]
) -> None:
    source, loss = checkpoint
    assert_same_files(folder / "two", source)
    for _, next_loss in (found["checkpoint"] for found in ranks):
        assert next_loss == pytest.approx(loss, abs=1e-5)
    assert_same_files(folder / "bf16-sharded", next((folder / "bf16").iterdir()))
    huggingface.make_and_save(None, folder / "saved-by-one")
    for file in (folder / "saved-by-one").iterdir():
        assert (folder / "saved" / file.name).read_bytes() == file.read_bytes(), file.name


def test_what_cannot_be_divided_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    wanted = ("pre-gates", "one data type", "share none", 'dense_weights="host"')
    for found in ranks:
        for message, text in zip(found["refused"], wanted, strict=True):
            assert "--shard-dense" in message
            assert text in message


def test_one_process_has_nothing_to_divide() -> None:
    with pytest.raises(ConfigError, match="there is one; drop it, or resume with --no-shard-dense"):
        overspill.offload(TASK.model(), mode="host", slots=2, device="cpu", quiet=True, **SHARDED)
