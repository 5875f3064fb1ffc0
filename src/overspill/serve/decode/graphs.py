"""Decoding steps as CUDA graphs, one for each size of a batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overspill.compute.highest_triton import highest
from overspill.core.routing import RoutingSource, StepSource
from overspill.models.huggingface.recurrent import RecurrentStates
from overspill.serve.decode.staging import Staging
from overspill.serve.decode.step import Batch, Computed, Sources
from overspill.serve.paged import Span
from overspill.serve.sampling import Draw
from overspill.transfer.driver import own_stream

Numbers = NDArray[np.int64]
_NUMBERS = 8
"""Numbers of a sequence beside its blocks: token, position, 1 if it is real, the position of the
last token of its source, the slot of its state, and the three numbers of its draw."""
_WARM = 2
"""Steps before a capture: they compile kernels and choose algorithms."""


class CaptureError(Exception):
    """A step has operations that a CUDA graph cannot contain."""


class _Inputs(NamedTuple):
    """Numbers and blocks of batches of one size."""

    host: list[tuple[Numbers, Numbers]]
    """Two copies in pinned memory: a row for each number, and a row of blocks for each sequence."""
    memory: Tensor
    """Numbers and blocks on the device, the tokens first."""
    rest: Tensor
    """The part of `memory` after the tokens."""


class DecodeGraphs:
    """CUDA graphs of a step for batches of any size up to `max_batch`. A batch is filled up to the
    next power of two with rows whose keys go to the block `spare`."""

    def __init__(
        self,
        step: Callable[[Batch], Computed],
        max_batch: int,
        max_blocks: int,
        spare: int,
        device: torch.device,
        sources: Sequence[RoutingSource] = (),
        source_blocks: int = 0,
        first_layer: int = 0,
        states: RecurrentStates | None = None,
    ) -> None:
        """`sources` choose the experts of each layer from `first_layer` on, if they replace the
        routers. The source of a sequence, in encoder-decoders, has up to `source_blocks` blocks.
        `states` are states that steps change beside keys and values."""
        self._step = step
        self._states = states
        self._sources = sources
        self._first_layer = first_layer
        self._spare = spare
        self._device = device
        self._size = 1
        while self._size < max_batch:
            self._size *= 2
        self._source_blocks = source_blocks
        length = self._size * (_NUMBERS + max_blocks + source_blocks)
        with torch.inference_mode(False):  # they outlive it
            self._input = torch.zeros(length, dtype=torch.int64, device=device)
            # two: one is written while the other may still be copied
            self._staging = [Staging(length, device) for _ in range(2)]
            self._ids: Tensor | None = None
            if sources:
                ids = len(sources), self._size, sources[0].top_k
                self._ids = torch.zeros(ids, dtype=torch.int32, device=device)
        self._turn = 0  # the index of the one that was written last
        on_gpu = device.type == "cuda"
        self._copied = [torch.cuda.Event() for _ in self._staging] if on_gpu else []
        self._inputs: dict[int, _Inputs] = {}  # by the size of a batch, as the next
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._rows: dict[tuple[int, int], Computed] = {}  # results of the first rows of graphs
        self._pool: Any = None  # memory that all graphs share: one runs at a time

    def run(
        self, tokens: Sequence[int] | Tensor, spans: Sequence[Span], draws: Sequence[Draw]
    ) -> Computed:
        """Compute the logits after the next token of each sequence, and draw tokens with them. The
        results are valid until the next call, which may get the drawn tokens as its tokens."""
        count = len(spans)
        size = 1 << (count - 1).bit_length()
        self._turn = turn = 1 - self._turn
        if self._copied:
            self._copied[turn].synchronize()  # long ago, unless steps were given up
        inputs = self._inputs_of(size)
        numbers, blocks = inputs.host[turn]
        numbers[1, :count] = [span.before for span in spans]
        numbers[2, :count] = 1
        numbers[4, :count] = [span.state for span in spans]
        numbers[5:, :count] = np.array([draw.numbers() for draw in draws]).T
        after = blocks.shape[1] - self._source_blocks
        for number, span in enumerate(spans):
            blocks[number, : len(span.blocks)] = span.blocks
            if span.source is not None:
                numbers[3, number] = span.source.count - 1
                blocks[number, after : after + len(span.source.blocks)] = span.source.blocks
        if count < size:
            numbers[:, count:] = 0
            numbers[4, count:] = 0 if self._states is None else self._states.spare
            blocks[count:, [0, after] if self._source_blocks else 0] = self._spare
        if isinstance(tokens, Tensor):
            self._staging[turn].copy_to(inputs.rest, size)
            if tokens.data_ptr() != self._input.data_ptr():  # else the last step has written them
                self._input[:count] = tokens
        else:
            numbers[0, :count] = tokens
            self._staging[turn].copy_to(inputs.memory)
        if self._copied:
            self._copied[turn].record()
        if self._ids is not None:
            self._choose_experts(self._ids[:, :count])
        return self._replay(size, count)

    def _inputs_of(self, size: int) -> "_Inputs":
        if size not in self._inputs:
            parts = [self._parts(staging.host, size) for staging in self._staging]
            host = [(numbers.numpy(), blocks.numpy()) for numbers, blocks in parts]
            length = sum(part.numel() for part in parts[0])
            self._inputs[size] = _Inputs(host, self._input[:length], self._input[size:length])
        return self._inputs[size]

    def _choose_experts(self, ids_LBK: Tensor) -> None:
        first, count = self._sources[0], ids_LBK.shape[1]
        if isinstance(first, StepSource) and all(source is first for source in self._sources):
            ids_LBK.copy_(
                first.all_layers(count, self._device)[self._first_layer :][: len(ids_LBK)]
            )
            return
        for number, source in enumerate(self._sources):
            ids_LBK[number] = source(self._first_layer + number, count, self._device)

    def _parts(self, memory: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return views of the numbers of a batch of `size` rows, and of the blocks of each row."""
        width = len(memory) // self._size
        numbers, blocks = memory[: width * size].split((_NUMBERS * size, (width - _NUMBERS) * size))
        return numbers.view(_NUMBERS, size), blocks.view(size, -1)

    def _replay(self, size: int, count: int) -> Computed:
        if self._device.type != "cuda":
            return _first_rows(self._compute(size), count)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        graph, computed = self._graphs[size]
        graph.replay()
        if (size, count) not in self._rows:
            self._rows[size, count] = _first_rows(computed, count)
        return self._rows[size, count]

    def _compute(self, size: int) -> Computed:
        numbers, blocks = self._parts(self._input, size)
        tokens, positions, real, last, slots, *draws = numbers
        sources = None
        if self._source_blocks:
            blocks, of_sources = blocks.split(
                (blocks.shape[1] - self._source_blocks, self._source_blocks), dim=1
            )
            sources = Sources(last, of_sources)
        ids = None if self._ids is None else self._ids[:, :size]
        computed = self._step(Batch(tokens, positions, real, blocks, slots, ids, sources))
        if not computed.logits_BV.is_cuda:  # Triton's interpreter would take longer than the step
            return computed
        seeds, counts, temperatures = draws
        # written where the next step reads them
        chosen = highest(computed.logits_BV, seeds, counts, temperatures, tokens)
        return computed._replace(chosen=chosen)

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Computed]:
        # one for all: cuBLAS keeps 32 MiB for each stream it was used on
        stream = own_stream(self._device, "capture")
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            tokens = self._input[:size].clone()
            slots = self._parts(self._input, size)[0][4]
            saved = None if self._states is None else self._states.save(slots)
            for _ in range(_WARM):  # the same keys and values again
                self._compute(size)
                self._input[:size] = tokens
                if self._states is not None and saved is not None:
                    self._states.restore(slots, saved)
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


def _first_rows(computed: Computed, count: int) -> Computed:
    """Return results without the rows that fill a batch up."""
    logits, ids, chosen, inputs = computed
    if chosen is not None:
        chosen = chosen[0][:count], chosen[1][:count]
    return Computed(logits[:count], ids[:, :count], chosen, [x[:count] for x in inputs])
