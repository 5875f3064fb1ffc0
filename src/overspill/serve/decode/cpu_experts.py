"""Missing experts of a decoding step that the CPU computes while the GPU goes on."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from overspill.compute.activation import Activation
from overspill.compute.decode import constants
from overspill.compute.decode.cpu import hint
from overspill.compute.decode.routing import PinnedExperts, Routed, look_up
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


class CpuExperts:
    """Experts in host memory or on disk: the native thread that computes them, and the memory that
    it shares with the kernels."""

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
        """The GPU reads `link_share` sixteenths of the missing experts of several tokens."""
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
    def free_slots(self) -> int | None:
        """Host slots that experts on disk share and no step needs, until experts move; None if no
        expert is on disk."""
        return None if self._reads is None else self._engine.memory.cache_slots - self._most - _FREE

    @property
    def fits(self) -> bool:
        """Whether a step finds enough host slots."""
        return self.free_slots is None or self.free_slots >= 0

    def update(self) -> None:
        """Follow experts that have moved."""
        if self._reads is not None:
            return
        records = self._engine.addresses.host_addresses()
        self._table.set_pinned(records)
        for layer, addresses in enumerate(records):
            self._runner.set_records(layer, addresses)

    def follows(self, n_rows: int) -> bool:
        """Return whether `begin` has an effect. The caches of the CPU were measured to gain for one
        token; experts of several do not fit."""
        return self._reads is not None or n_rows == 1

    def begin(self, ahead: Ahead, real_B: Tensor) -> None:
        """Have the CPU load experts of a later layer into its caches between its requests, or read
        them from disk when it gets the next one."""
        if not self.follows(len(real_B)):
            return
        table = self._table.offsets[ahead.layer]
        if ahead.ids_BK is None:
            hint(self._all[:, None], None, table, ahead.layer, self.buffers)
        else:
            hint(ahead.ids_BK, real_B, table, ahead.layer, self.buffers)

    def needs_look_up(self, n_rows: int) -> bool:
        """Return whether the GPU reads a part of the missing experts. With few rows an expert would
        be read more than once."""
        return self._link_share > 0 and self._reads is None and n_rows >= constants.SEVERAL

    def look_up(
        self, layer: int, ids_BK: Tensor, weights_BK: Tensor, real_B: Tensor, x_BD: Tensor
    ) -> Routed:
        """Find the chosen experts in GPU memory, and list the others in the buffers, except those
        that the GPU reads."""
        link = None
        if self.needs_look_up(len(x_BD)):
            link = PinnedExperts(self._table.pinned[layer], self._link_share)
        offsets_E = self._table.offsets[layer]
        return look_up(ids_BK, weights_BK, offsets_E, real_B, x_BD, self.buffers, link)

    def wait_released(self) -> None:
        """Wait until no step that has ended keeps host slots."""
        if self._reads is not None:
            self._reads.wait_released()

    def resume(self) -> None:
        """Wake the native thread before a step."""
        self._runner.resume()

    def launched(self) -> None:
        """Record the end of a step that is on the current stream."""
        if self._end is not None:
            self._end.record()

    def check(self) -> None:
        """Raise the failure of a step that has ended, if it has failed."""
        self._runner.check()

    def pause(self) -> None:
        """Let the native thread sleep: no step follows for a while."""
        self._runner.pause()

    @property
    def n_misses(self) -> int:
        """Number of experts that the CPU has computed."""
        return self._runner.n_misses

    def take_spans(self) -> list[Span]:
        """Return the times since the last call at which experts were computed, or loaded ahead."""
        size = self._engine.layout.weight_bytes_in
        return [
            Span(
                "cpu compute" if count > 0 else "cpu load",
                str(abs(count)),
                begin,
                end,
                abs(count) * size(layer),
            )
            for layer, begin, end, count in self._runner.take_spans()
            if count
        ]

    def close(self) -> None:
        """End the native thread, when no step is on the device."""
        self._runner.close()

    def __del__(self) -> None:
        """Wait for a step that is on the device when its LLM is deleted: the step waits for the
        native thread. A step of another LLM may wait for it too."""
        if self._end is not None and not (self._engine.lifetime.forked or sys.is_finalizing()):
            self._end.synchronize()
