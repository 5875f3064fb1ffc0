"""Decoding steps as CUDA graphs, one for each size of a batch."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from overspill.core.routing import RoutingSource, StepSource
from overspill.serve.decode.staging import Staging
from overspill.serve.decode.step import Batch, Computed
from overspill.serve.paged import Span

_NUMBERS = 3
"""Of a sequence beside its blocks: token, position, and 1 if it is real."""
_WARM = 2
"""Steps before a capture: they compile kernels and choose algorithms."""


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: cuBLAS keeps 32 MiB for each stream it was used on."""
    return torch.cuda.Stream(device)


class CaptureError(Exception):
    """A step did something that a CUDA graph cannot contain."""


class DecodeGraphs:
    """Replays a step for batches of any size up to `max_batch`. A batch is filled up to the next
    power of two with rows whose keys go to the block `spare`."""

    def __init__(
        self,
        step: Callable[[Batch], Computed],
        max_batch: int,
        max_blocks: int,
        spare: int,
        device: torch.device,
        sources: Sequence[RoutingSource] = (),
    ) -> None:
        """`sources` choose the experts of each layer, if that are not the routers."""
        self._step = step
        self._sources = sources
        self._spare = spare
        self._device = device
        self._size = 1
        while self._size < max_batch:
            self._size *= 2
        length = self._size * (_NUMBERS + max_blocks)
        with torch.inference_mode(False):  # they outlive it
            self._input = torch.zeros(length, dtype=torch.int64, device=device)
            # two: one is written while the other may still be copied
            self._staging = [Staging(length, device) for _ in range(2)]
            self._ids: Tensor | None = None
            if sources:
                ids = len(sources), self._size, sources[0].top_k
                self._ids = torch.zeros(ids, dtype=torch.int32, device=device)
        self._copied: list[torch.cuda.Event | None] = [None, None]  # what was written there
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._pool: Any = None  # memory that all graphs share: one runs at a time

    def run(self, tokens: Sequence[int] | Tensor, spans: Sequence[Span]) -> Computed:
        """The logits after the next token of each sequence; valid until the next call."""
        size = 1 << (len(spans) - 1).bit_length()
        self._staging.reverse()
        self._copied.reverse()
        staging, copied = self._staging[0], self._copied[0]
        if copied is not None:  # long ago, unless steps were given up
            copied.synchronize()
        count = len(spans)
        numbers, blocks = (part.numpy() for part in self._parts(staging.host, size))
        numbers[:, count:] = 0
        if not isinstance(tokens, Tensor):
            numbers[0, :count] = tokens
        numbers[1, :count] = [span.before for span in spans]
        numbers[2, :count] = 1
        for number, span in enumerate(spans):
            blocks[number, : len(span.blocks)] = span.blocks
        blocks[count:, 0] = self._spare
        staging.copy_to(self._input[: numbers.size + blocks.size])
        if self._device.type == "cuda":
            self._copied[0] = event = torch.cuda.Event()
            event.record()
        if isinstance(tokens, Tensor):
            self._input[:count] = tokens
        if self._ids is not None:
            self._choose_experts(self._ids[:, :count])
        logits, ids = self._replay(size)
        return Computed(logits[:count], ids[:, :count])

    def _choose_experts(self, ids_LBK: Tensor) -> None:
        first, count = self._sources[0], ids_LBK.shape[1]
        if isinstance(first, StepSource) and all(source is first for source in self._sources):
            ids_LBK.copy_(first.all_layers(count, self._device)[: len(ids_LBK)])
            return
        for layer, source in enumerate(self._sources):
            ids_LBK[layer] = source(layer, count, self._device)

    def _parts(self, memory: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Of a batch of `size` rows: its numbers, and the blocks of each row."""
        width = len(memory) // self._size
        numbers, blocks = memory[: width * size].split((_NUMBERS * size, (width - _NUMBERS) * size))
        return numbers.view(_NUMBERS, size), blocks.view(size, -1)

    def _replay(self, size: int) -> Computed:
        if self._device.type != "cuda":
            return self._compute(size)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        graph, computed = self._graphs[size]
        graph.replay()
        return computed

    def _compute(self, size: int) -> Computed:
        (tokens, positions, real), blocks = self._parts(self._input, size)
        ids = None if self._ids is None else self._ids[:, :size]
        return self._step(Batch(tokens, positions, real, blocks, ids))

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Computed]:
        stream = _capture_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM):  # the same keys and values again
                self._compute(size)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads go on: they upload experts
            with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                computed = self._compute(size)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(str(error).splitlines()[0]) from error
        self._pool = graph.pool()
        return graph, computed
