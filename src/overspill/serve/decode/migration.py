"""Copies of experts of a later layer to the device, while a decoding step computes."""

import torch
from torch import Tensor

from overspill.compute.decode.migrate import Region, migrate, new_region
from overspill.moe.engine import Engine
from overspill.serve.decode.table import ExpertTable
from overspill.transfer.driver import own_stream


class Migration:
    """GPU slots for experts of later layers, and the stream that copies them. Copies are part of a
    CUDA graph: the device finds the experts to copy without the host."""

    def __init__(self, engine: Engine, table: ExpertTable, layers: int) -> None:
        """There are slots for the layer that computes, and for `layers` later layers."""
        self._engine = engine
        self._table = table
        self._depth = layers + 1
        self._regions: dict[tuple[int, int], Region] = {}  # by their size and number
        on_gpu = engine.device.type == "cuda"
        self._stream = own_stream(engine.device, "migration") if on_gpu else None
        # of this step, by layer: the table of copied experts, the event after which it is valid,
        # and the ids, whose memory is not used for anything else until then
        self._begun: dict[int, tuple[Tensor, torch.cuda.Event | None, Tensor]] = {}
        every = torch.arange(engine.n_experts, dtype=torch.int32, device=engine.device)
        self._all = every[:, None]
        self._real = torch.ones(engine.n_experts, dtype=torch.int64, device=engine.device)

    def begin(self, layer: int, ids_BK: Tensor | None, real_B: Tensor) -> None:
        """Begin to copy the experts of a layer with these ids (None: all) that are not on the
        device."""
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
        layout, key = self._engine.layout, (n_slots, layer % self._depth)
        if key not in self._regions:
            with torch.inference_mode(False):  # it outlives it
                self._regions[key] = new_region(
                    n_slots, self._engine.n_experts, layout.stored[0], self._table.base
                )
        return self._regions[key].with_records(layout.stored_in(layer)[0])

    def end(self, layer: int) -> Tensor | None:
        """Return the table of the experts that were copied for a layer, for the kernels that follow
        on the current stream; None if `begin` was not called."""
        found = self._begun.pop(layer, None)
        if found is None:
            return None
        table, end, _ = found
        if end is not None:
            torch.cuda.current_stream(self._engine.device).wait_event(end)
        return table

    def abort(self) -> None:
        """Wait for the copies of a step that has failed: the capture of a graph cannot end
        before."""
        for layer in list(self._begun):
            self.end(layer)

    def close(self) -> None:
        """Free the slots, when no step is on the device and none follows."""
        self._regions.clear()
