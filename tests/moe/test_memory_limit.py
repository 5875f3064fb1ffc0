"""The limit of GPU memory is the process's: several engines share it."""

from types import SimpleNamespace

import pytest
import torch

from overspill.moe.memory_limit import MemoryLimits


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """The fraction that torch was told for each device; a device has 100 bytes."""
    told: dict[int, float] = {}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: told.update({device: fraction}),
    )
    return told


def test_closing_one_engine_keeps_the_limit_of_another(fractions: dict[int, float]) -> None:
    limits = MemoryLimits()
    limits.set("one", torch.device("cuda:0"), 30)
    assert fractions == {0: 0.3}
    limits.set("two", torch.device("cuda"), 20)
    assert fractions == {0: 0.5}, "each can use its budget"
    limits.lift("one")
    assert fractions == {0: 0.2}
    limits.lift("one")  # again
    assert fractions == {0: 0.2}
    limits.lift("two")
    assert fractions == {0: 1.0}


def test_budgets_of_all_memory_are_no_more_than_it(fractions: dict[int, float]) -> None:
    limits = MemoryLimits()
    limits.set("one", torch.device("cuda:0"), 90)
    limits.set("two", torch.device("cuda:0"), 90)
    assert fractions == {0: 1.0}


def test_devices_have_limits_of_their_own(fractions: dict[int, float]) -> None:
    limits = MemoryLimits()
    limits.set("one", torch.device("cuda:0"), 30)
    limits.set("two", torch.device("cuda:1"), 20)
    limits.set("cpu", torch.device("cpu"), 10)
    assert fractions == {0: 0.3, 1: 0.2}
    limits.lift("two")
    limits.lift("cpu")
    assert fractions == {0: 0.3, 1: 1.0}
