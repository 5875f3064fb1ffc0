"""Decoding of models with the common structure: steps without the host."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from overspill.serve.decode.graphs import DecodeGraphs
from overspill.serve.decode.step import DecodeStep, ExpertTable
from overspill.serve.decode.structure import Decoder, read_decoder
from overspill.serve.paged import PagedCache, Span


class Decode:
    """Computes one token of each sequence of a batch, if all experts are on the device."""

    def __init__(
        self, decoder: Decoder, engine: Any, cache: PagedCache, context: int, max_batch: int
    ) -> None:
        self._table = ExpertTable(engine)
        like = decoder.embedding.new_empty(0)
        memory = []
        for number, layer in enumerate(decoder.layers):
            empty = like.new_empty(0, layer.attention.kv_heads, layer.attention.width)
            memory.append(cache.memory(number, empty, empty))
        step = DecodeStep(decoder, self._table, memory, cache.block_size)
        max_blocks = -(-context // cache.block_size)
        device = engine.device
        self._graphs = DecodeGraphs(step, max_batch, max_blocks, cache.spare_block, device)

    @classmethod
    def of(cls, model: Any, cache: PagedCache, context: int, max_batch: int) -> Self | None:
        """None if the model has another structure."""
        with torch.inference_mode(False):
            decoder = read_decoder(model, context)
            if decoder is None:
                return None
            return cls(decoder, model.overspill, cache, context, max_batch)

    def run(self, tokens: Sequence[int], spans: Sequence[Span]) -> Tensor | None:
        """The logits after the tokens; None if some experts are elsewhere."""
        return self._graphs.run(tokens, spans) if self._table.update() else None
