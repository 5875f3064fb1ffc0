"""Experts in host memory during a decoding step: the CPU computes them while the GPU goes on."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from overspill.compute.activation import Activation
from overspill.compute.decode import constants
from overspill.compute.decode.cpu import CpuRows, MissRequest, hint
from overspill.compute.decode.routing import PinnedExperts
from overspill.compute.misses import MissRunner
from overspill.core.errors import ConfigError
from overspill.hardware.machine import usable_cores
from overspill.moe.engine import Engine
from overspill.serve.decode.modes import Ahead
from overspill.serve.decode.table import ExpertTable
from overspill.trace.spans import Span
from overspill.transfer.mapped import on_device

_FREE = 2
"""Host slots that other passes can use meanwhile."""


class HostExperts:
    """The thread that computes them, and the memory that it shares with the kernels."""

    def __init__(
        self,
        engine: Engine,
        table: ExpertTable,
        activation: Activation | None,
        top_k: int,
        max_batch: int,
        link_share: int,
        inject: Callable[[str], object] | None = None,
    ) -> None:
        """The device reads `link_share` sixteenths of the experts that several tokens miss."""
        self._engine = engine
        self._link_share = link_share
        self._table = table
        self._on_gpu = engine.device.type == "cuda"
        self._end = torch.cuda.Event() if self._on_gpu else None
        self._all = torch.arange(engine.n_experts, dtype=torch.int32, device=engine.device)
        self._most = min(engine.n_experts, max_batch * top_k)  # experts of a step
        self._reads = engine.addresses.new_disk_reads() if engine.memory.uses_disk else None
        if not self.fits:
            raise ConfigError(f"{self._most} experts of a step do not fit into host memory at once")
        self._runner = MissRunner(
            engine.shape,
            engine.dtype,
            engine.n_layers,
            engine.n_experts,
            max_batch,
            top_k,
            engine.settings.threads or max(1, usable_cores() - 1),  # one launches the next step
            self._on_gpu,
            inject,
            activation=activation,
            source=self._reads,
            format=engine.layout.format,
            ranks=engine.layout.ranks,
        )
        try:
            host = self._runner.host
            self.buffers = self._runner.view(on_device(self._runner.memory, engine.device))
            # the pairs of all rows are listed: that of a row and its k-th expert is always the same
            pairs = torch.arange(len(host.rows_P), dtype=torch.int32)
            host.rows_P.copy_(pairs // top_k)
        except BaseException:
            self._runner.close()
            raise

    @property
    def most_bytes(self) -> int:
        """Steps need no memory of the device for them."""
        return 0

    @property
    def free_slots(self) -> int | None:
        """Host slots that experts on disk share and no step needs, until experts move; None: no
        expert is there."""
        return None if self._reads is None else self._engine.memory.cache_slots - self._most - _FREE

    @property
    def fits(self) -> bool:
        """Whether a step finds enough host slots."""
        return self.free_slots is None or self.free_slots >= 0

    def update(self) -> None:
        """Follows experts that have moved."""
        if self._reads is not None:
            return
        records = self._engine.addresses.host_addresses()
        self._table.set_pinned(records)
        for layer, addresses in enumerate(records):
            self._runner.set_records(layer, addresses)

    def link(self, layer: int, n_rows: int) -> PinnedExperts | None:
        """Experts of a layer that the device reads where they are in host memory. With few rows an
        expert would be read more than once."""
        share = self._link_share
        if not share or self._reads is not None or n_rows < constants.SEVERAL:
            return None
        return PinnedExperts(self._table.pinned[layer], share)

    def follows(self, n_rows: int) -> bool:
        """The caches of the CPU were measured to gain for one token; experts of several do not
        fit."""
        return self._reads is not None or n_rows == 1

    def begin(self, ahead: Ahead, real_B: Tensor) -> None:
        """Experts that a later layer will miss are loaded into the caches of the CPU between its
        requests, or read from disk when it gets the next one."""
        if not self.follows(len(real_B)):
            return
        table = self._table.offsets[ahead.layer]
        if ahead.ids_BK is None:
            hint(self._all[:, None], None, table, ahead.layer, self.buffers)
        else:
            hint(ahead.ids_BK, real_B, table, ahead.layer, self.buffers)

    def staged(self, layer: int) -> Tensor | None:
        """Nothing is copied to the device."""
        return None

    def abort(self) -> None: ...

    def wait_released(self) -> None:
        """Until no step that has ended keeps host slots."""
        if self._reads is not None:
            self._reads.wait_released()

    def resume(self) -> None:
        """A step follows."""
        self._runner.resume()

    def launched(self) -> None:
        """The step is on the current stream."""
        if self._end is not None:
            self._end.record()

    def check(self) -> None:
        """Raises what failed in a step that has ended."""
        self._runner.check()

    def pause(self) -> None:
        """No step follows for a while."""
        self._runner.pause()

    def request(self, layer: int, missed_B: Tensor | None) -> MissRequest | None:
        """Tells the thread that the token rows and the missing experts of a layer are in the
        buffers."""
        buffers = self.buffers
        assert missed_B is not None
        return MissRequest(buffers.ready_L[layer:], buffers.done_L[layer:], missed_B)

    def rows(self, layer: int, missed_B: Tensor | None) -> CpuRows | None:
        """What the CPU computes of them."""
        assert missed_B is not None
        return CpuRows(self.buffers.out_RD, missed_B, self.buffers.done_L[layer:])

    @property
    def n_misses(self) -> int:
        return self._runner.n_misses

    def take_spans(self) -> list[Span]:
        """When experts were computed, or loaded before, since the last call."""
        size = self._engine.layout.weight_bytes
        return [
            Span(
                "cpu compute" if count > 0 else "cpu load",
                str(abs(count)),
                begin,
                end,
                abs(count) * size,
            )
            for _, begin, end, count in self._runner.take_spans()
            if count
        ]

    def close(self) -> None:
        """When no step is on the device."""
        self._runner.close()

    def __del__(self) -> None:
        """A step may be on the device when its LLM is given up: it waits for the thread. One of
        another LLM may as well wait for what this thread holds."""
        if self._end is not None and not (self._engine.lifetime.forked or sys.is_finalizing()):
            self._end.synchronize()
