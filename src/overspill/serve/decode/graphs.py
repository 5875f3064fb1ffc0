"""Decoding steps as CUDA graphs, one for each size of a batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overspill.serve.decode.step import DecodeStep
from overspill.serve.paged import Span

_WARM = 2
"""Steps before a capture: they compile kernels and choose algorithms."""


class DecodeGraphs:
    """Replays a step for batches of any size up to `max_batch`. A batch is filled up to the next
    power of two with rows whose keys go to the block `spare`."""

    def __init__(
        self, step: DecodeStep, max_batch: int, max_blocks: int, spare: int, device: torch.device
    ) -> None:
        self._step = step
        self._spare = spare
        self._device = device
        self._size = 1
        while self._size < max_batch:
            self._size *= 2
        shape = self._size, 2 + max_blocks
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):  # they outlive it
            self._rows = torch.zeros(shape, dtype=torch.int64, device=device)
            # two: one is written while the other may still be copied
            self._hosts = [
                torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu) for _ in range(2)
            ]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # memory that all graphs share: one runs at a time

    def run(self, tokens: Sequence[int] | Tensor, spans: Sequence[Span]) -> Tensor:
        """The logits [N, V] after the next token of each sequence; valid until the next call."""
        known = not isinstance(tokens, Tensor)
        size = 1 << (len(spans) - 1).bit_length()
        self._hosts.reverse()
        host = self._hosts[0]
        rows = host.numpy()
        for number, span in enumerate(spans):
            rows[number, :2] = tokens[number] if known else 0, span.before
            rows[number, 2 : 2 + len(span.blocks)] = span.blocks
        rows[len(spans) : size, :2] = 0
        rows[len(spans) : size, 2] = self._spare
        self._rows[:size].copy_(host[:size], non_blocking=True)
        if isinstance(tokens, Tensor):
            self._rows[: len(spans), 0] = tokens
        return self._replay(size)[: len(spans)]

    def _replay(self, size: int) -> Tensor:
        if self._device.type != "cuda":
            return self._compute(size)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits

    def _compute(self, size: int) -> Tensor:
        rows = self._rows[:size]
        # copies: the kernels read rows that are adjacent
        tokens, positions = rows[:, 0].contiguous(), rows[:, 1].contiguous()
        return self._step(tokens, positions, rows[:, 2:])

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM):  # the same keys and values again
                self._compute(size)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads go on: they upload experts
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._compute(size)
        self._pool = graph.pool()
        return graph, logits
