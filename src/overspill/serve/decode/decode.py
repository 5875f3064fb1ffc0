"""Decoding of models with the common structure: steps without the host."""

import logging
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.serve.decode.graphs import DecodeGraphs
from overspill.serve.decode.host_experts import HostExperts
from overspill.serve.decode.step import DecodeStep, ExpertTable
from overspill.serve.decode.structure import Decoder, Experts, read_decoder
from overspill.serve.paged import PagedCache, Span

_log = logging.getLogger("overspill")


class Decode:
    """Computes one token of each sequence of a batch. Experts that are not on the device are
    computed by the CPU."""

    def __init__(
        self, decoder: Decoder, engine: Any, cache: PagedCache, context: int, max_batch: int
    ) -> None:
        self._engine = engine
        self._decoder = decoder
        self._max_batch = max_batch
        self._max_blocks = -(-context // cache.block_size)
        self._cache = cache
        self._table = ExpertTable(engine)
        first = decoder.layers[0].attention
        like = decoder.embedding.new_empty(first.kv_heads, first.width)
        self._memory = cache.allocate(len(decoder.layers), like)
        self._host: HostExperts | None = None
        self._refused = False  # the CPU cannot compute these experts
        self._graphs: dict[bool, DecodeGraphs] = {}  # with experts on the host, and without

    @classmethod
    def of(cls, model: Any, cache: PagedCache, context: int, max_batch: int) -> Self | None:
        """None if the model has another structure."""
        with torch.inference_mode(False):
            decoder = read_decoder(model, context)
            if decoder is None:
                return None
            return cls(decoder, model.overspill, cache, context, max_batch)

    def run(self, tokens: Sequence[int] | Tensor, spans: Sequence[Span]) -> Tensor | None:
        """The logits after the tokens, which may be on the device; None if some experts are where
        a step cannot find them. Valid until the next call."""
        engine = self._engine
        with engine.exclusive():  # no thread moves experts before the step is on the stream
            moved = self._table.update()
            complete = all(count == engine.n_experts for count in engine.homes)
            if not complete:
                if not self._has_host():
                    return None
                assert self._host is not None
                if moved:
                    self._host.update()
                self._host.resume()
            if complete not in self._graphs:
                self._graphs[complete] = self._new_graphs(None if complete else self._host)
            return self._graphs[complete].run(tokens, spans)

    def _new_graphs(self, host: HostExperts | None) -> DecodeGraphs:
        step = DecodeStep(self._decoder, self._table, self._memory, self._cache.block_size, host)
        limits = self._max_batch, self._max_blocks, self._cache.spare_block
        return DecodeGraphs(step, *limits, self._engine.device)

    def _has_host(self) -> bool:
        if self._host is None and not self._refused:
            experts = [each.feed for each in self._decoder.layers if isinstance(each.feed, Experts)]
            try:
                if self._engine.uses_disk:
                    raise ConfigError("some experts are on disk")
                with torch.inference_mode(False):  # the buffers outlive it
                    self._host = HostExperts(
                        self._engine, experts[0], self._size, self._engine.settings.inject
                    )
                    self._host.update()
            except ConfigError as error:
                self._refused = True
                _log.info("the model's own modules compute each token: %s", error)
        return self._host is not None

    @property
    def _size(self) -> int:
        """Rows of the largest batch: a power of two."""
        return 1 << (self._max_batch - 1).bit_length()

    def check(self) -> None:
        """Raises what failed in a step that has ended."""
        if self._host is not None:
            self._host.check()

    def pause(self) -> None:
        """No step follows for a while."""
        if self._host is not None:
            self._host.pause()

    def close(self) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)  # a step may wait for the CPU
        self._graphs.clear()
        if self._host is not None:
            self._host.close()
