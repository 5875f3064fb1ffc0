from pathlib import Path

import pytest
import torch

from overspill.core.errors import BudgetError, ConfigError, DiskError
from overspill.models.budgets import Budgets

CPU = torch.device("cpu")


def test_budgets_reach_the_planner_in_bytes(tmp_path: Path) -> None:
    budgets = Budgets("1GiB", 4096, tmp_path, mode="disk", slots=3, keep_gradients=True)
    request = budgets.request(CPU)
    assert (request.gpu_memory, request.host_memory) == (2**30, 4096)
    assert (request.mode, request.slots) == ("disk", 3)
    assert request.disk_free is not None
    assert request.keep_gradients


def test_without_budgets_the_machine_gives_them() -> None:
    request = Budgets().request(CPU)
    assert request.gpu_memory > 0
    assert request.host_memory > request.gpu_memory
    assert request.disk_free is None


def test_a_size_is_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="--gpu-memory='lots' is not a size"):
        Budgets(gpu_memory="lots")
    with pytest.raises(ConfigError, match="--host-memory=0 must be more than zero"):
        Budgets(host_memory=0)


def test_settings_are_no_dictionary() -> None:
    with pytest.raises(ConfigError, match=r"is not Settings; give overspill\.Settings\(...\)"):
        Budgets(settings={"residency": False})  # type: ignore[arg-type]


def test_more_than_the_machine_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"--host-memory 1000TiB exceeds the .* --disk"):
        Budgets(host_memory="1000TiB").request(CPU)
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="not writable"):
        Budgets(disk=tmp_path / "file" / "folder").request(CPU)


def test_dense_states_leave_the_compute_device_only_where_it_is_a_gpu() -> None:
    """Unless that is asked for."""
    request = Budgets().request(CPU)
    assert (request.dense_states, request.can_map) == ("gpu", True)
    assert Budgets(dense_states="host").request(CPU).dense_states == "host"
