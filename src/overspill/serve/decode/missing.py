"""The interface of experts that a decoding step does not find in GPU memory."""

from typing import Protocol

from torch import Tensor

from overspill.compute.decode.routing import Routed
from overspill.compute.misses import MissBuffers
from overspill.serve.decode.modes import Ahead


class MissingExperts(Protocol):
    """Experts in host memory or on disk: the CPU computes them, or the GPU reads them."""

    @property
    def buffers(self) -> MissBuffers | None:
        """Memory in which steps list missing experts for the CPU; None if the GPU reads them."""

    def update(self) -> None:
        """Follow experts that have moved."""

    def follows(self, n_rows: int) -> bool:
        """Return whether `begin` has an effect in a step with this number of token rows."""

    def begin(self, ahead: Ahead, real_B: Tensor) -> None:
        """Begin to load experts of a later layer."""

    def needs_look_up(self, n_rows: int) -> bool:
        """Return whether `look_up` is needed in a step with this number of token rows, after the
        kernel that chooses experts and finds those in GPU memory."""

    def look_up(
        self, layer: int, ids_BK: Tensor, weights_BK: Tensor, real_B: Tensor, x_BD: Tensor
    ) -> Routed:
        """Find the chosen experts of a layer, in GPU memory or outside, and list those that the CPU
        computes."""

    def close(self) -> None:
        """Free memory and threads, when no step is on the device."""
