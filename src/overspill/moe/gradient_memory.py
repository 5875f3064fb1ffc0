"""Memory of gradients that wait, on the compute device or in host memory."""

from collections.abc import Callable

from overspill.moe.residents.gradients import ResidentGradients
from overspill.moe.residents.host_gradients import HostGradients
from overspill.moe.streaming.gradients import StreamingGradients
from overspill.plan.residents import spread_among
from overspill.tiers.places import ExpertPlaces


class GradientMemory:
    """Settings of the memory of gradients that wait for others of their step, or for `step()`, and
    the number of gradients on the device, which is changed between steps. A part of
    `ExpertGradients`."""

    def __init__(
        self,
        places: ExpertPlaces,
        residents: ResidentGradients,
        streaming: Callable[[], StreamingGradients | None],
    ) -> None:
        """`streaming` gives None if all experts are resident for good."""
        self._places = places
        self._residents = residents
        self._streaming = streaming
        self.keep: bool | None = None
        """Whether the optimizer keeps gradients until `step()`; None: there is none yet."""
        self.accumulates = False
        """Whether a step had gradients of several backward passes."""
        self.may_use_host = False
        """Whether gradients of resident experts may wait for the global norm in host memory."""

    @property
    def are_kept(self) -> bool:
        """Whether gradients wait for others or for `step()`."""
        return self.accumulates or self.keep is True

    def uses_host(self, keep: bool) -> bool:
        """Whether gradients of resident experts are kept in host memory if the optimizer keeps
        gradients: if each of them has a host slot, and nothing is added to them."""
        has_slots = (
            self._places.host_slots >= len(self._places.entries) and not self._places.disk_slots
        )
        return keep and self.may_use_host and has_slots and not self.accumulates

    def host(self) -> HostGradients | None:
        """Return the memory of gradients of resident experts in host memory, if they use it."""
        streaming = self._streaming()
        if streaming is None or not self.uses_host(self.keep is True):
            return None
        return streaming.host_gradients

    @property
    def on_device(self) -> int:
        """Gradients that have memory on the device beside the experts' own: kept ones of experts
        resident if others of them are kept in host memory, else sums of streamed experts."""
        if self.host() is not None:
            return sum(self._residents.on_device)
        streaming = self._streaming()
        return 0 if streaming is None else len(streaming.on_device)

    def set_on_device(self, count: int) -> None:
        if self.host() is not None:
            self._residents.keep_on_device(spread_among(count, self._places.residents))
        elif (streaming := self._streaming()) is not None:
            streaming.on_device.resize(count)
