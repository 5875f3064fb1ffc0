"""The peak of reserved memory, without torch's peak statistics."""

from types import SimpleNamespace

import pytest
import torch

from overspill.moe.device_memory import CudaMemory

CURRENT, ALLOCATED = "reserved_bytes.all.current", "reserved_bytes.all.allocated"


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Torch's statistics; the device has 1000 bytes, of which the process may use half."""
    stats = {CURRENT: 0, ALLOCATED: 0}
    properties = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.5)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return stats


def test_the_peak_is_what_was_reserved_since_the_last_call(stats: dict[str, int]) -> None:
    memory = CudaMemory(torch.device("cuda:0"))
    stats.update({CURRENT: 100, ALLOCATED: 100})
    assert memory.peak() == 100
    stats.update({CURRENT: 60, ALLOCATED: 180})  # 80 more, then 120 were freed
    assert memory.peak() == 180
    assert memory.peak() == 60
    stats.update({CURRENT: 90, ALLOCATED: 210})
    memory.reset()
    assert memory.peak() == 90


def test_the_peak_is_not_above_the_limit(stats: dict[str, int]) -> None:
    """Cached memory was freed and reserved again several times."""
    memory = CudaMemory(torch.device("cuda:0"))
    stats.update({CURRENT: 400, ALLOCATED: 5000})
    assert memory.peak() == 500
