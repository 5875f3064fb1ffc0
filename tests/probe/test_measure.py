"""The machine's limits: measured where there is no GPU."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from overspill.compute.cpu_kernel import cpu_isa
from overspill.core.errors import DiskError
from overspill.probe import measure
from overspill.probe.measure import matrix_rate, measure_disk, measure_machine
from tests.probe.little import LITTLE, assert_limits

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_machine_without_a_gpu_is_measured(threads: int) -> None:
    told: list[tuple[int, int]] = []
    limits = measure_machine(
        CPU, threads, None, lambda _, done, total: told.append((done, total)), LITTLE
    )
    assert_limits(limits, {"matrix", "ssd_read", "ssd_write"})
    assert (limits.cores, limits.kernel) == (threads, cpu_isa())
    assert [row.size for row in limits.transfers] == [64 << 10, 256 << 10]
    assert told == [(n, len(told) - 1) for n in range(len(told))]


def test_a_disk_is_measured_and_nothing_stays_on_it(tmp_path: Path) -> None:
    limits = measure_machine(CPU, 1, tmp_path / "disk", None, LITTLE)
    assert_limits(limits, {"matrix"})
    assert not list((tmp_path / "disk").iterdir())


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskError, match="give --disk a folder you may write to"):
        measure_disk(tmp_path / "file" / "folder", LITTLE)


def test_torch_gets_its_threads_back() -> None:
    before = torch.get_num_threads()
    measure_machine(CPU, 1, None, None, LITTLE)
    assert torch.get_num_threads() == before


def test_the_best_rate_of_growing_matrices_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = dataclasses.replace(LITTLE, largest_matrix=512)
    assert matrix_rate(CPU, effort) > 0
    for slowest, best in ((1e-3, 512), (8.0, 256)):  # the time of the largest matrix
        times = {512: slowest}

        def seconds(product: Callable[[], None], limit: float, times: dict = times) -> float:
            size = inspect.signature(product).parameters["a"].default.shape[0]
            return times.get(size, 1e-3)

        monkeypatch.setattr(measure, "seconds_of", seconds)
        assert matrix_rate(CPU, effort) == 2 * best**3 / 1e-3
