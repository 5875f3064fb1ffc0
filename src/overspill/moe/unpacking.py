"""Waves of packed experts, unpacked some experts at a time."""

import itertools
from collections.abc import Iterator

import torch

from overspill.moe.layer_pass import Wave
from overspill.tiers.layout import RecordLayout

_BUFFER = 64 << 20
"""Bytes of unpacked experts at once, if one is not larger."""


def buffer_bytes(layout: RecordLayout) -> int:
    """Memory of the experts that are unpacked at once."""
    if layout.format is None:
        return 0
    return max(_BUFFER, layout.shape.numel * layout.dtype.itemsize)


def unpacked(waves: Iterator[Wave], layout: RecordLayout) -> Iterator[Wave]:
    """The same waves in the dtype of computation: those of packed experts in parts, each of which
    is valid until the next."""
    if layout.format is None:
        yield from waves
        return
    each = layout.shape.numel
    n_experts = buffer_bytes(layout) // (each * layout.dtype.itemsize)
    memory = None
    for wave in waves:
        assert wave.counts is not None
        starts = [0, *itertools.accumulate(wave.counts)]
        if memory is None:
            device = wave.weights.device
            memory = torch.empty(n_experts, each, dtype=layout.dtype, device=device)
        for first in range(0, len(wave.counts), n_experts):
            stop = min(first + n_experts, len(wave.counts))
            if starts[first] == starts[stop]:
                continue
            for row, expert in enumerate(range(first, stop)):
                if wave.counts[expert]:
                    threads = torch.get_num_threads()
                    layout.unpack(wave.weights[expert], memory[row], threads)
            ends = wave.ends[first:stop]
            yield Wave(
                wave.first + first,
                wave.first + stop,
                wave.start + starts[first],
                wave.start + starts[stop],
                memory[: stop - first],
                ends - starts[first] if first else ends,
                wave.counts[first:stop],
            )
