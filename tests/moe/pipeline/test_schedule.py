"""The order of a pipelined pass, and what it leaves behind when a step fails."""

import pytest
import torch
from torch import Tensor

from overspill.moe.pipeline.schedule import run_pipeline
from overspill.transfer.streams import StreamEvent
from overspill.transfer.work_stream import Arrival

CPU = torch.device("cpu")


class Travelling:
    """Rows that are on their way until they are waited for."""

    def __init__(self, name: str, under_way: set[str]) -> None:
        self._name, self._under_way = name, under_way
        under_way.add(name)

    def synchronize(self) -> None:
        self._under_way.discard(self._name)

    def query(self) -> bool:
        return self._name not in self._under_way

    def record(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError

    wait = record


class Noted:
    """Steps that note their order; one of them fails after it has begun transfers."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing
        self.order: list[str] = []
        self.under_way: set[str] = set()

    def _begin(self, name: str, arrivals: list[Arrival]) -> None:
        self.order.append(name)
        event = StreamEvent(Travelling(name, self.under_way))
        arrivals.append(Arrival(CPU, torch.zeros(1), event, torch.zeros(1)))
        if name == self._failing:
            raise MemoryError(name)

    def send(self, number: int, sent: list[Arrival]) -> None:
        self._begin(f"S{number}", sent)

    def compute(self, number: int, rows: list[Tensor], returned: list[Arrival]) -> None:
        assert len(rows) == 1
        assert f"S{number}" not in self.under_way
        self._begin(f"R{number}", returned)

    def finish(self, number: int, rows: list[Tensor]) -> None:
        assert f"R{number}" not in self.under_way
        self.order.append(f"finish {number}")


@pytest.mark.parametrize("n", [1, 2, 5])
def test_sends_and_returns_alternate(n: int) -> None:
    steps = Noted()
    run_pipeline(n, steps.send, steps.compute, steps.finish)
    assert not steps.under_way
    assert sorted(steps.order) == sorted(f"{k}{i}" for k in ("S", "R", "finish ") for i in range(n))
    if n == 5:
        link = [name for name in steps.order if not name.startswith("finish")]
        assert link == ["S0", "S1", "R0", "S2", "R1", "S3", "R2", "S4", "R3", "R4"]


@pytest.mark.parametrize("failing", ["S0", "S1", "R0", "R3", "S4", "R4"])
def test_a_failure_waits_for_what_is_under_way(failing: str) -> None:
    """Else the memory of these rows would be used for others before they have arrived."""
    steps = Noted(failing)
    with pytest.raises(MemoryError, match=failing):
        run_pipeline(5, steps.send, steps.compute, steps.finish)
    assert not steps.under_way
