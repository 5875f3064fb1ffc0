"""What a decoding step needs of experts that are not on the device."""

from typing import Protocol

from torch import Tensor

from overspill.compute.decode.cpu import CpuRows, MissRequest
from overspill.compute.decode.routing import PinnedExperts
from overspill.compute.misses import MissBuffers
from overspill.serve.decode.modes import Ahead
from overspill.trace.spans import Span


class MissingExperts(Protocol):
    """Computes them on the CPU, or lets the device read them."""

    @property
    def buffers(self) -> MissBuffers | None:
        """Where they are listed for the CPU."""

    @property
    def fits(self) -> bool:
        """Whether a step finds enough host slots."""

    @property
    def free_slots(self) -> int | None:
        """Host slots that experts on disk share and no step needs, until experts move; None: no
        expert is there."""

    @property
    def most_bytes(self) -> int:
        """Memory of the device that steps may need for them."""

    @property
    def n_misses(self) -> int:
        """Those that the CPU has computed."""

    def link(self, layer: int, n_rows: int) -> PinnedExperts | None:
        """Those of a layer that the device reads where they are in host memory."""

    def follows(self, n_rows: int) -> bool:
        """Whether `begin` does anything in a step of so many token rows."""

    def begin(self, ahead: Ahead, real_B: Tensor) -> None:
        """A later layer needs these experts."""

    def staged(self, layer: int) -> Tensor | None:
        """Where those of a layer are on the device that were copied after `begin`."""

    def abort(self) -> None:
        """The step has failed before all of it was on the stream."""

    def request(self, layer: int, missed_B: Tensor | None) -> MissRequest | None:
        """Tells the CPU that the token rows and the missing experts of a layer are listed."""

    def rows(self, layer: int, missed_B: Tensor | None) -> CpuRows | None:
        """What the CPU computes of them."""

    def update(self) -> None:
        """Follows experts that have moved."""

    def resume(self) -> None:
        """A step follows."""

    def launched(self) -> None:
        """The step is on the current stream."""

    def check(self) -> None:
        """Raises what failed in a step that has ended."""

    def pause(self) -> None:
        """No step follows for a while."""

    def wait_released(self) -> None:
        """Until no step that has ended keeps host slots."""

    def take_spans(self) -> list[Span]:
        """When the CPU computed experts, since the last call."""

    def close(self) -> None:
        """When no step is on the device."""
