"""The CPU's experts of one pass, and what is noted of their time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from overspill.compute.activation import Activation
from overspill.compute.runner import Order
from overspill.core.experts import Phase
from overspill.moe.passes import HostWork
from overspill.optim.kernel import AdamHyper
from overspill.transfer.lanes import Mark, Stamp


class Notes(Protocol):
    """Who wants to know how long things take."""

    def note_gap(self, phase: Phase, seconds: float) -> None:
        """From the end of a layer's pass, when both sides were done, until the next layer's rows
        were there."""

    def note_job(self, phase: Phase, tokens: Sequence[int], seconds: float) -> None:
        """The experts of one pass on the CPU."""

    def note_handover(self, seconds: float) -> None:
        """From the moment that rows were there until both sides were done, beyond the CPU's work:
        the way to the CPU and back, or longer, where the device was the last."""


class _Taker(Protocol):
    """Who knows where results lie."""

    def take(self, job: "Job", out_RD: Tensor, dweights_R: Tensor | None = None) -> None: ...


@dataclass
class Job(HostWork):
    """The CPU's experts of one pass, and where their rows are among those of the buffers. It does
    not hold the pass, whose end says that a graph was thrown away."""

    experts: _Taker
    entered: int  # which pass through a layer it belongs to
    layer: int
    phase: Phase
    activation: Activation | None
    place: slice  # of its rows among those of the pass
    places: dict[int, tuple[int, int]]
    need_dw: bool = False
    hyper: AdamHyper | None = None
    order: Order | None = None  # of the runner; None: a thread of ours does it
    made: Mark | None = None  # the rows are in the buffers
    done: bool = False
    sent: Stamp | None = None
    taken: Stamp | None = None
    seconds: float = 0.0  # that the runner took
    traced: bool = False

    @property
    def rows(self) -> int:
        return max(stop for _, stop in self.places.values())

    @property
    def name(self) -> str:
        return f"{self.phase.value} {self.layer}: {', '.join(map(str, self.places))}"

    def follows(self, other: "Job") -> bool:
        """Whether it was that of the next layer, in the same direction, and both are over."""
        if self.phase is not other.phase or self.entered != other.entered + 1:
            return False
        if abs(self.layer - other.layer) != 1:  # the first one after the last: another batch
            return False
        return None not in (other.sent, other.taken, self.sent)

    def take(self, out_RD: Tensor, dweights_R: Tensor | None = None) -> None:
        self.experts.take(self, out_RD, dweights_R)
