"""Ranks that divide the experts train as one process with the batches of all: five steps."""

from dataclasses import replace

import pytest

from overspill.compute.cpu_kernel import cpu_isa
from overspill.moe.settings import Settings
from tests.moe.oracle import Task
from tests.moe.streaming.policies import every_other
from tests.parallel.training import Case, Result, assert_follows, plain, results_of
from tests.slow import chosen, slow_names

TASK = Task(n_layers=2, lr=1e-3, steps=5)  # five experts: neither 2 nor 4 ranks divide them
ON_DISK = {"mode": "disk", "slots": 2, "host_slots": 2}

ON_CPU = Settings(cpu_experts=True, cpu_training=True, cpu_policy=every_other)

CASES = {
    "experts in host memory, clipping and accumulation": Case(
        replace(TASK, clip=0.5, micro_batches=2)
    ),
    "experts on the device, accumulation, uneven batches": Case(
        replace(TASK, micro_batches=2), uneven=True, where={"mode": "gpu"}
    ),
    "disk": Case(TASK, uneven=True, where=ON_DISK),
    "disk, one of each layer resident, clipped": Case(
        replace(TASK, clip=0.5), where={**ON_DISK, "gpu_experts": 2, "keep_gradients": True}
    ),
    "an expert without tokens, recomputed blocks": Case(
        replace(TASK, starve=True, checkpoint=True)
    ),
    "kept activations, recomputed blocks": Case(
        replace(TASK, checkpoint=True), settings=Settings(activations="keep")
    ),
    "CPU experts, clipping and accumulation": Case(
        replace(TASK, clip=0.5, micro_batches=2), settings=ON_CPU
    ),
    "CPU experts, uneven batches, recomputed blocks": Case(
        replace(TASK, checkpoint=True), uneven=True, settings=ON_CPU
    ),
    "four ranks": Case(replace(TASK, clip=0.5), n_ranks=4, uneven=True),
    "four ranks, an expert without tokens": Case(
        replace(TASK, starve=True, micro_batches=2), n_ranks=4, where={"mode": "gpu"}
    ),
}

SLOW = (
    "experts on the device, accumulation, uneven batches",
    "disk",
    "an expert without tokens, recomputed blocks",
)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Result]]:
    disk = tmp_path_factory.mktemp("disk")
    found = results_of(
        {
            name: replace(case, where={**case.where, "disk": disk}) if "disk" in name else case
            for name, case in chosen(request, CASES, *SLOW).items()
        }
    )
    assert not list(disk.iterdir())
    return found


@pytest.mark.parametrize("name", slow_names(CASES, *SLOW))
def test_ranks_follow_plain_training(name: str, results: dict[str, list[Result]]) -> None:
    assert_follows(results[name], plain(CASES[name]))
    with_cpu = CASES[name].settings.cpu_experts and cpu_isa() is not None
    assert all(bool(result.cpu_jobs) == with_cpu for result in results[name])
