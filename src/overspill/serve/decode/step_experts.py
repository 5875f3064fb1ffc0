"""The experts of a decoding step, for fused steps and for steps through a model's own modules."""

from typing import Protocol

from torch import Tensor

from overspill.compute.activation_form import Form
from overspill.compute.decode.cpu import CpuRows, MissRequest
from overspill.compute.decode.experts import experts
from overspill.compute.decode.routing import Routed, look_up
from overspill.compute.misses import MissBuffers
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.serve.decode.modes import Ahead, Mode, Routings
from overspill.serve.decode.table import ExpertTable


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


class StepExperts:
    """Experts of all layers: their look-up, the preparation of later layers, and their sums."""

    def __init__(self, table: ExpertTable, missing: MissingExperts | None, mode: Mode) -> None:
        """`missing` gives experts that are not in GPU memory, as `mode` wants it; None if all are
        there."""
        self.table = table
        self._missing = missing
        self._mode = mode
        self.buffers = None if missing is None else missing.buffers
        """Memory in which missing experts are listed for the CPU, if it computes them."""

    def needs_look_up(self, n_rows: int) -> bool:
        """Return whether `look_up` is needed after the kernel that chooses experts."""
        return self._missing is not None and self._missing.needs_look_up(n_rows)

    def follows(self, n_rows: int) -> bool:
        """Return whether experts of a later layer are of use to a step with `n_rows` token rows."""
        return self._missing is not None and self._missing.follows(n_rows)

    def begin_ahead(self, layer: int, routings: Routings, real_B: Tensor) -> None:
        """Begin to load the experts of a later layer that the mode names while `layer` computes."""
        if self._missing is None:
            return
        ahead = self._mode.ahead(layer, routings)
        if ahead is not None:
            self._missing.begin(ahead, real_B)

    def look_up(
        self, layer: int, ids_BK: Tensor, weights_BK: Tensor, real_B: Tensor, x_BD: Tensor
    ) -> Routed:
        """Find experts that are chosen already, and list the missing ones for the CPU."""
        if self._missing is not None:
            return self._missing.look_up(layer, ids_BK, weights_BK, real_B, x_BD)
        return look_up(ids_BK, weights_BK, self.table.offsets[layer], real_B, x_BD, None)

    def compute(
        self, placeholder: ExpertPlaceholder, form: Form, x_BD: Tensor, routed: Routed
    ) -> tuple[Tensor, CpuRows | None]:
        """Return the weighted sum over the experts of each token, without those that the CPU
        computes, and the rows of the CPU that are to be added. The same kernel requests these."""
        layer, shape = placeholder.layer, placeholder.engine.shape
        request = rows = None
        if self.buffers is not None and routed.missed_B is not None:
            ready, done = self.buffers.ready_L[layer:], self.buffers.done_L[layer:]
            request = MissRequest(ready, done, routed.missed_B)
            rows = CpuRows(self.buffers.out_RD, routed.missed_B, done)
        y_BD = experts(
            x_BD, routed.weights, routed.offsets, self.table.base, shape.d_hidden, form,
            shape.bias, shape.transposed, request, self.table.packed(layer, form),
            self.table.low_rank,
        )  # fmt: skip
        return y_BD, rows
