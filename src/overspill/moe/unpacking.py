"""Waves of packed experts, unpacked some experts at a time."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from overspill.compute.low_rank import Adapters
from overspill.moe.layer_pass import Wave
from overspill.tiers.layout import RecordLayout

_BUFFER = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Bytes of unpacked experts at once, if one is not larger: on a GPU, of enough experts that the
launches take less time than their products."""


def buffer_bytes(layout: RecordLayout, device: torch.device, n_experts: int) -> int:
    """Memory of the experts of a layer that are unpacked at once."""
    if layout.format is None:
        return 0
    each = layout.shape.numel * layout.dtype.itemsize
    return each * min(n_experts, max(1, _BUFFER[device.type] // each))


def unpacked(
    waves: Iterator[Wave], layout: RecordLayout, layer: int, n_experts: int
) -> Iterator[Wave]:
    """Yield the waves of a layer with `n_experts`, in the dtype of computation and with the
    low-rank parts of their records. Waves of packed experts come in parts, each of which is valid
    until the next."""
    if layout.format is None:
        for wave in waves:
            yield replace(wave, adapters=Adapters.of_records(layout, wave.weights))
        return
    memory, format = None, layout.format.of_layer(layer)
    for wave in waves:
        assert wave.counts is not None
        starts = [0, *itertools.accumulate(wave.counts)]
        if memory is None:
            flat = torch.empty(
                buffer_bytes(layout, wave.weights.device, n_experts),
                dtype=torch.uint8,
                device=wave.weights.device,
            )
            memory = flat.view(layout.dtype).view(-1, layout.shape.numel)
        for first in range(0, len(wave.counts), len(memory)):
            stop = min(first + len(memory), len(wave.counts))
            if starts[first] == starts[stop]:
                continue
            weights, counts = memory[: stop - first], wave.counts[first:stop]
            ends = wave.ends[first:stop] - starts[first] if first else wave.ends[:stop]
            records = wave.weights[first:stop]
            format.unpack_several(records, weights, counts, ends)
            yield Wave(
                wave.first + first,
                wave.first + stop,
                wave.start + starts[first],
                wave.start + starts[stop],
                weights,
                ends,
                counts,
                Adapters.of_records(layout, records),
            )
