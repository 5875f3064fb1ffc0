"""Experts in host memory during a decoding step: the CPU computes them while the GPU goes on."""

import sys
from collections.abc import Callable

import torch

from overspill.compute.activation import Activation
from overspill.compute.misses import MissRunner
from overspill.core.errors import ConfigError
from overspill.hardware.machine import usable_cores
from overspill.moe.engine import Engine
from overspill.transfer.driver import await_signal, can_signal, signal
from overspill.transfer.mapped import on_device


class HostExperts:
    """The thread that computes them, and the signals on the stream. `begin` and `end` are parts of
    a CUDA graph."""

    def __init__(
        self,
        engine: Engine,
        activation: Activation | None,
        top_k: int,
        max_batch: int,
        inject: Callable[[str], object] | None = None,
    ) -> None:
        self._engine = engine
        self._on_gpu = engine.device.type == "cuda"
        self._runner = MissRunner(
            engine.shape,
            engine.dtype,
            engine.n_layers,
            engine.n_experts,
            max_batch,
            top_k,
            max(1, usable_cores() - 1),  # one launches the next step
            self._on_gpu,
            inject,
            activation=activation,
        )
        try:
            host = self._runner.host
            stream = torch.cuda.current_stream(engine.device) if self._on_gpu else None
            if stream is not None and not can_signal(stream, host.done_L.data_ptr()):
                raise ConfigError("the CUDA driver lacks stream memory operations")
            self.buffers = self._runner.view(on_device(self._runner.memory, engine.device))
            # the pairs of all rows are listed: that of a row and its k-th expert is always the same
            pairs = torch.arange(len(host.rows_P), dtype=torch.int32)
            host.rows_P.copy_(pairs // top_k)
        except BaseException:
            self._runner.close()
            raise

    def update(self) -> None:
        """Follows experts that have moved."""
        for layer, addresses in enumerate(self._engine.host_addresses()):
            self._runner.set_records(layer, addresses)

    def resume(self) -> None:
        """A step follows."""
        self._runner.resume()

    def check(self) -> None:
        """Raises what failed in a step that has ended."""
        self._runner.check()

    def pause(self) -> None:
        """No step follows for a while."""
        self._runner.pause()

    def begin(self, layer: int) -> None:
        """The token rows and the missing experts of a layer are in the buffers."""
        ready = self._runner.host.ready_L[layer]
        if self._on_gpu:
            signal(torch.cuda.current_stream(self._engine.device), ready.data_ptr(), 1)
        else:
            ready.fill_(1)

    def end(self, layer: int) -> None:
        """Waits, on the stream, for what the CPU has computed."""
        done = self._runner.host.done_L[layer]
        if self._on_gpu:
            stream = torch.cuda.current_stream(self._engine.device)
            await_signal(stream, done.data_ptr(), 1)
            signal(stream, done.data_ptr(), 0)
            return
        while not int(done):
            pass
        done.fill_(0)

    @property
    def n_misses(self) -> int:
        return self._runner.n_misses

    def close(self) -> None:
        """When no step is on the device."""
        self._runner.close()

    def __del__(self) -> None:
        """A step may be on the device when its LLM is given up: it waits for the thread."""
        if self._on_gpu and not (self._engine.lifetime.forked or sys.is_finalizing()):
            torch.cuda.synchronize(self._engine.device)
