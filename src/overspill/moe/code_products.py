"""Packed experts with few token rows, computed by the CPU from their codes without unpacking."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from overspill.compute.activation import form_of
from overspill.compute.activation_form import Form
from overspill.compute.cpu_kernel import (
    ExpertRows,
    kernel_forward,
    max_kernel_rows,
    why_unsupported,
)
from overspill.compute.record_format import RecordFormat
from overspill.moe.dispatch import Dispatcher
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.tiers.layout import RecordLayout


def without_few_rows(
    waves: Iterator[Wave],
    layout: RecordLayout,
    layer_pass: LayerPass,
    dispatcher: Dispatcher,
    x_TD: Tensor,
    y_RD: Tensor,
) -> Iterator[Wave]:
    """Write the outputs of packed experts with few token rows into `y_RD`, where the CPU is the
    compute device, and yields waves of the other experts."""
    format = None if layout.format is None else layout.format.of_layer(layer_pass.layer)
    on_cpu = isinstance(format, RecordFormat) and y_RD.device.type == "cpu"
    form = _form(layout, layer_pass) if on_cpu else None
    if form is None or not isinstance(format, RecordFormat) or format.native is None:
        yield from waves
        return
    limit, threads = max_kernel_rows(layout.dtype, backward=False), torch.get_num_threads()
    for wave in waves:
        for run, is_few in _runs(wave, limit):
            if not is_few:
                yield run
                continue
            assert run.counts is not None
            x_rows = dispatcher.dispatch(layer_pass.rows, x_TD, run.start, run.end)
            ends = [0, *itertools.accumulate(run.counts)]
            places = zip(run.weights, itertools.pairwise(ends), strict=True)
            experts = [ExpertRows(record, *place) for record, place in places]
            y_rows = y_RD[run.start : run.end]
            args = x_rows, y_rows, experts, layout.shape, threads
            kernel_forward(*args, form=form, format=format, low_rank=layout.low_rank)


def _form(layout: RecordLayout, layer_pass: LayerPass) -> Form | None:
    """The activation of the kernel, if it can compute the pass. Weights of a pass that will be
    differentiated are unpacked, as in backward."""
    if layer_pass.training or layer_pass.kept is not None:
        return None
    if layer_pass.dropout is not None or layer_pass.adapters is not None:
        return None
    activation = layer_pass.activation
    if why_unsupported(layout.dtype, layout.shape, activation) is not None:
        return None
    return form_of(activation, layout.shape.gated)


def _runs(wave: Wave, limit: int) -> Iterator[tuple[Wave, bool]]:
    """Neighbouring experts of a wave that have at most `limit` token rows, or more."""
    counts = wave.counts
    assert counts is not None
    starts = [0, *itertools.accumulate(counts)]
    for is_few, group in itertools.groupby(range(len(counts)), lambda at: counts[at] <= limit):
        positions = list(group)
        first, stop = positions[0], positions[-1] + 1
        if starts[first] == starts[stop]:
            continue
        yield (
            Wave(
                wave.first + first,
                wave.first + stop,
                wave.start + starts[first],
                wave.start + starts[stop],
                wave.weights[first:stop],
                wave.ends[first:stop] - starts[first],
                counts[first:stop],
            ),
            is_few,
        )
