"""Missing experts of a decoding step that the GPU reads over the link, or copies ahead."""

from collections.abc import Collection

import torch
from torch import Tensor

from overspill.compute.decode.routing import PinnedExperts, Routed, look_up
from overspill.compute.misses import MissBuffers
from overspill.moe.engine import Engine
from overspill.serve.decode.migration import Migration
from overspill.serve.decode.modes import Ahead
from overspill.serve.decode.table import ExpertTable

_ALL = 16
"""Sixteenths of the missing experts that the GPU reads."""


class LinkedExperts:
    """Experts in pinned host memory that the GPU reads; those of later layers are copied ahead."""

    buffers: MissBuffers | None = None

    def __init__(
        self, engine: Engine, table: ExpertTable, layers_ahead: int, sizes: Collection[int]
    ) -> None:
        """`sizes` are the numbers of experts of a layer that steps copy at once: there are slots
        for each."""
        assert not engine.memory.uses_disk
        self.most_bytes = (layers_ahead + 1) * sum(sizes) * engine.layout.weight_bytes
        """GPU memory that steps may need for copies."""
        self._engine = engine
        self._table = table
        self._migration = Migration(engine, table, layers_ahead)

    def update(self) -> None:
        """Follow experts that have moved."""
        self._table.set_pinned(self._engine.addresses.host_addresses())

    def follows(self, n_rows: int) -> bool:
        """Return True: experts are copied ahead for any number of token rows."""
        return True

    def begin(self, ahead: Ahead, real_B: Tensor) -> None:
        """Begin to copy experts of a later layer."""
        self._migration.begin(ahead.layer, ahead.ids_BK, real_B)

    def needs_look_up(self, n_rows: int) -> bool:
        """Return True: the kernel that chooses experts finds only those in GPU memory."""
        return True

    def look_up(
        self, layer: int, ids_BK: Tensor, weights_BK: Tensor, real_B: Tensor, x_BD: Tensor
    ) -> Routed:
        """Find the chosen experts in GPU memory, among the copies, or in host memory."""
        link, staged_E = PinnedExperts(self._table.pinned[layer], _ALL), self._migration.end(layer)
        offsets_E = self._table.offsets[layer]
        return look_up(ids_BK, weights_BK, offsets_E, real_B, x_BD, None, link, staged_E)

    def abort(self) -> None:
        """Forget copies of a step that has failed before all of it was on the stream."""
        self._migration.abort()

    def close(self) -> None:
        """Free the slots, when no step is on the device."""
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        self._migration.close()
