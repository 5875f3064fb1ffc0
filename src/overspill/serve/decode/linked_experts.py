"""Experts in host memory during a decoding step: the device reads them, or copies them ahead."""

from collections.abc import Collection

import torch
from torch import Tensor

from overspill.compute.decode.cpu import CpuRows, MissRequest
from overspill.compute.decode.routing import PinnedExperts
from overspill.compute.misses import MissBuffers
from overspill.moe.engine import Engine
from overspill.serve.decode.migration import Migration
from overspill.serve.decode.modes import Ahead
from overspill.serve.decode.table import ExpertTable
from overspill.trace.spans import Span

_ALL = 16


class LinkedExperts:
    """As `HostExperts`, without the CPU."""

    buffers: MissBuffers | None = None
    fits = True
    free_slots = None
    n_misses = 0

    def __init__(
        self, engine: Engine, table: ExpertTable, layers_ahead: int, sizes: Collection[int]
    ) -> None:
        """`sizes` are the numbers of experts of a layer that steps copy at once: there are slots
        for each."""
        assert not engine.memory.uses_disk
        self.most_bytes = (layers_ahead + 1) * sum(sizes) * engine.layout.weight_bytes
        self._engine = engine
        self._table = table
        self._migration = Migration(engine, table, layers_ahead)

    def update(self) -> None:
        """Follows experts that have moved."""
        self._table.set_pinned(self._engine.addresses.host_addresses())

    def link(self, layer: int, n_rows: int) -> PinnedExperts | None:
        """What was not copied before is read where it is."""
        return PinnedExperts(self._table.pinned[layer], _ALL)

    def follows(self, n_rows: int) -> bool:
        """Copies are made for any number."""
        return True

    def begin(self, ahead: Ahead, real_B: Tensor) -> None:
        """Copies experts of a later layer."""
        self._migration.begin(ahead.layer, ahead.ids_BK, real_B)

    def staged(self, layer: int) -> Tensor | None:
        """Where those of this layer are."""
        return self._migration.end(layer)

    def abort(self) -> None:
        """A step has failed."""
        self._migration.abort()

    def request(self, layer: int, missed_B: Tensor | None) -> MissRequest | None:
        return None

    def rows(self, layer: int, missed_B: Tensor | None) -> CpuRows | None:
        return None

    def resume(self) -> None: ...

    def launched(self) -> None: ...

    def check(self) -> None: ...

    def pause(self) -> None: ...

    def wait_released(self) -> None: ...

    def take_spans(self) -> list[Span]:
        return []

    def close(self) -> None:
        """When no step is on the device."""
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        self._migration.close()
