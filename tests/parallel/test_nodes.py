"""Two nodes of two ranks train as one process with the batches of all. The ranks of a node divide
the experts, nodes hold the same ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overspill.core.errors import ConfigError, RankError
from overspill.moe.settings import Settings
from tests.moe.oracle import Task
from tests.moe.streaming.policies import every_other
from tests.parallel import test_huggingface as huggingface
from tests.parallel.processes import run_ranks
from tests.parallel.test_checkpoint import assert_same_files, load_and_save, train_and_save
from tests.parallel.training import Case, assert_follows, offload, plain, train_rank
from tests.slow import chosen, slow_names

TASK = Task(n_layers=2, lr=1e-3, steps=5)  # five experts: one rank has three, the other two
ON_DISK = {"mode": "disk", "slots": 2, "host_slots": 2}

CASES = {
    "experts on the device, clipped, uneven": Case(
        replace(TASK, clip=0.5), 4, uneven=True, where={"mode": "gpu"}
    ),
    "dense parameters that all ranks divide, an expert without tokens, CPU experts": Case(
        replace(TASK, starve=True, checkpoint=True),
        4,
        where={"mode": "host", "slots": 2, "shard_dense": True},
        settings=Settings(cpu_experts=True, cpu_training=True, cpu_policy=every_other),
    ),
    "disk, residents that change on one rank, accumulation, recomputed blocks": Case(
        replace(TASK, clip=0.5, micro_batches=2, checkpoint=True),
        4,
        uneven=True,
        where={**ON_DISK, "host_slots": 4, "gpu_experts": 2},
    ),
}

SLOW = "experts on the device, clipped, uneven"


def move_on_first_rank(engine: Any, step: int) -> None:
    if dist.get_rank() == 0 and step:
        engine.set_residents([step % 2, 1 + step % 2])


def other_experts(mesh: DeviceMesh) -> str:
    """What each rank raises if expert 4 differs between nodes."""
    model = TASK.model()
    with torch.no_grad():
        model.moe_layers()[1].w_out[4] += mesh.get_local_rank("data")
    try:
        offload(model, mesh)
    except (ConfigError, RankError) as error:
        return str(error)
    return ""


def dynamic_placement(mesh: DeviceMesh) -> str:
    with pytest.raises(ConfigError) as error:
        offload(TASK.model(), mesh, settings=Settings(threads=1, placement="dynamic"))
    return str(error.value)


def work(_: DeviceMesh, cases: dict[str, Case], source: Path, folder: Path) -> dict[str, Any]:
    """What one rank finds, by test."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    found: dict[str, Any] = {}
    for name, case in cases.items():
        moves = {"before_step": move_on_first_rank} if "change" in name else {}
        found[name] = train_rank(mesh, case, **moves)
    found["other experts"] = other_experts(mesh)
    found["dynamic placement"] = dynamic_placement(mesh)
    found["checkpoint"] = load_and_save(mesh, source, folder)
    found["mixtral"] = huggingface.train_rank(mesh, "mixtral")
    huggingface.make_and_save(mesh, folder.parent / "saved")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> tuple[Path, float]:
    return train_and_save(folder / "one")


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, folder: Path, checkpoint: tuple[Path, float]
) -> list[dict[str, Any]]:
    disk = {"disk": folder / "disk"}
    cases = {
        name: replace(case, where={**case.where, **disk}) if "disk" in name else case
        for name, case in chosen(request, CASES, SLOW).items()
    }
    found = run_ranks(4, work, cases, checkpoint[0], folder / "nodes")
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@pytest.mark.parametrize("name", slow_names(CASES, SLOW))
def test_nodes_follow_plain_training(name: str, ranks: list[dict[str, Any]]) -> None:
    assert_follows([found[name] for found in ranks], plain(CASES[name]), copies=2)


def test_nodes_follow_eager_transformers(ranks: list[dict[str, Any]]) -> None:
    wanted = huggingface.plain("mixtral", n_ranks=4)
    huggingface.assert_follow_plain(wanted, [found["mixtral"] for found in ranks])


def test_nodes_read_and_write_the_checkpoints_of_one_process(
    folder: Path, checkpoint: tuple[Path, float], ranks: list[dict[str, Any]]
) -> None:
    source, loss = checkpoint
    assert_same_files(folder / "nodes", source)
    for _, next_loss in (found["checkpoint"] for found in ranks):
        assert next_loss == pytest.approx(loss, abs=1e-5)
    huggingface.make_and_save(None, folder / "saved-by-one")
    for file in (folder / "saved-by-one").iterdir():
        assert (folder / "saved" / file.name).read_bytes() == file.read_bytes(), file.name


def test_dynamic_placement_and_different_experts_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("not supported with several" in found["dynamic placement"] for found in ranks)
    what = "a digest of the experts that several nodes hold must be the same"
    assert all(what in found["other experts"] for found in ranks)
    failed = ["failed on rank 1" in found["other experts"] for found in ranks]
    assert failed == [True, False, True, False]  # ranks 0 and 2 do not hold expert 4
