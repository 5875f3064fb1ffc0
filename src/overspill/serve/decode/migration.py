"""Experts of a later layer on their way to the device, while a decoding step goes on."""

import torch
from torch import Tensor

from overspill.compute.decode.migrate import Region, migrate, new_region
from overspill.moe.engine import Engine
from overspill.serve.decode.table import ExpertTable
from overspill.transfer.driver import own_stream


class Migration:
    """GPU slots for the experts of the layers between, and the stream that copies. Part of a CUDA
    graph: the device finds out by itself what it copies."""

    def __init__(self, engine: Engine, table: ExpertTable, layers: int) -> None:
        """Experts of up to `layers` layers are on their way at a time, besides those of the layer
        that computes."""
        self._engine = engine
        self._table = table
        self._depth = layers + 1
        self._regions: dict[tuple[int, int], Region] = {}  # by their size and number
        on_gpu = engine.device.type == "cuda"
        self._stream = own_stream(engine.device, "migration") if on_gpu else None
        # of this step: where the experts of a layer are, once the event has passed; until then the
        # memory of their ids is not used for anything else
        self._begun: dict[int, tuple[Tensor, torch.cuda.Event | None, Tensor]] = {}
        every = torch.arange(engine.n_experts, dtype=torch.int32, device=engine.device)
        self._all = every[:, None]
        self._real = torch.ones(engine.n_experts, dtype=torch.int64, device=engine.device)

    def begin(self, layer: int, ids_BK: Tensor | None, real_B: Tensor) -> None:
        """Copies experts of a layer that are not on the device, or all of them."""
        if ids_BK is None:
            ids_BK, real_B = self._all, self._real
        region = self._region(layer, min(self._engine.n_experts, ids_BK.numel()))
        tables = self._table.offsets[layer], self._table.pinned[layer], self._table.base
        if self._stream is None:
            migrate(region, ids_BK, real_B, *tables)
            self._begun[layer] = region.table_E, None, ids_BK
            return
        # what used this region before is on the current stream
        self._stream.wait_stream(torch.cuda.current_stream(self._engine.device))
        with torch.cuda.stream(self._stream):
            migrate(region, ids_BK, real_B, *tables)
            end = torch.cuda.Event()
            end.record()
        self._begun[layer] = region.table_E, end, ids_BK

    def _region(self, layer: int, n_slots: int) -> Region:
        key = n_slots, layer % self._depth
        if key not in self._regions:
            with torch.inference_mode(False):  # it outlives it
                self._regions[key] = new_region(
                    n_slots, self._engine.n_experts, self._engine.layout.stored[0], self._table.base
                )
        return self._regions[key]

    def end(self, layer: int) -> Tensor | None:
        """Where experts are that were copied for a layer, for the kernels that follow; None if
        nothing was."""
        found = self._begun.pop(layer, None)
        if found is None:
            return None
        table, end, _ = found
        if end is not None:
            torch.cuda.current_stream(self._engine.device).wait_event(end)
        return table

    def abort(self) -> None:
        """A step has failed: its copies are not used. A graph that is captured cannot end before
        they are waited for."""
        for layer in list(self._begun):
            self.end(layer)

    def close(self) -> None:
        """When no step is on the device, and none follows."""
        self._regions.clear()
