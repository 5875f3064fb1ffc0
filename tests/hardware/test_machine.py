import os
from pathlib import Path

import pytest
import torch

from overspill.core.errors import ConfigError
from overspill.hardware import machine

MEMINFO = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    800 kB\n"


@pytest.fixture
def fake(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (cgroup / "job" / "task").mkdir(parents=True)
    return proc, cgroup


def _limit(folder: Path, limit: str, current: int, cache: int = 0) -> None:
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 0\n")


def test_without_cgroups_the_available_memory_is_the_machines(fake: tuple[Path, Path]) -> None:
    assert machine.available_memory(*fake) == 800 * 1024
    assert machine.total_memory(fake[0]) == 1000 * 1024


def test_the_tightest_limit_among_the_parents_counts(fake: tuple[Path, Path]) -> None:
    proc, cgroup = fake
    (proc / "self" / "cgroup").write_text("0::/job/task\n")
    _limit(cgroup / "job" / "task", "max", 50)
    _limit(cgroup / "job", str(400 * 1024), 300 * 1024)
    assert machine.available_memory(proc, cgroup) == 100 * 1024


def test_page_cache_can_still_be_taken(fake: tuple[Path, Path]) -> None:
    proc, cgroup = fake
    (proc / "self" / "cgroup").write_text("0::/job\n")
    _limit(cgroup / "job", str(400 * 1024), 300 * 1024, cache=200 * 1024)
    assert machine.available_memory(proc, cgroup) == 300 * 1024


def test_a_limit_above_the_machines_memory_is_none(fake: tuple[Path, Path]) -> None:
    proc, cgroup = fake
    (proc / "self" / "cgroup").write_text("0::/job\n")
    (cgroup / "job" / "memory.max").write_text(f"{2**63 - 4096}\n")  # and nothing else is read
    assert machine.available_memory(proc, cgroup) == 800 * 1024


def test_old_cgroups_are_read_too(fake: tuple[Path, Path]) -> None:
    proc, cgroup = fake
    (proc / "self" / "cgroup").write_text("4:cpu,memory:/job\n3:cpuset:/\n")
    folder = cgroup / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("2048\n")
    (folder / "memory.usage_in_bytes").write_text("1024\n")
    (folder / "memory.stat").write_text("")
    assert machine.available_memory(proc, cgroup) == 1024


def test_this_process_and_machine_have_sensible_sizes(tmp_path: Path) -> None:
    assert 0 < machine.available_memory() <= machine.total_memory()
    assert 1 <= machine.usable_cores() <= (os.cpu_count() or 1)
    ballast = bytearray(os.urandom(1) * 2**26)
    assert len(ballast) <= machine.peak_resident_memory()
    assert machine.disk_free(tmp_path / "not" / "there") > 0


@pytest.mark.gpu
def test_the_gpu_has_a_name_and_memory() -> None:
    found = machine.gpu()
    assert found is not None
    assert found.name
    assert found.memory > 2**30


def test_the_gpu_computes_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.choose_device() == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"--device cuda: .* finds no CUDA GPU; use device='cpu'"):
        machine.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert machine.choose_device() == torch.device("cuda", 1)
    assert machine.choose_device("cuda:0") == torch.device("cuda", 0)
    assert machine.choose_device("cpu") == torch.device("cpu")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="--device tpu is unknown; give cuda or cpu"):
        machine.choose_device("tpu")
    with pytest.raises(ConfigError, match="--device meta is not supported; give cuda or cpu"):
        machine.choose_device("meta")


def test_a_folder_is_on_root_if_the_nearest_one_that_exists_is(tmp_path: Path) -> None:
    assert machine.is_on_root(tmp_path / "not" / "there", root=tmp_path)
    assert machine.is_on_root("/")
    assert not machine.is_on_root("/proc/self")
