"""Waves of resident experts: nothing is waited for."""

import itertools
from collections.abc import Collection, Iterator

from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.residents.memory import Residents
from overspill.plan.waves import Candidate, next_wave


def resident_waves(
    residents: Residents,
    layer_pass: LayerPass,
    max_rows: int,
    grouped: bool,
    positions: Collection[int] | None = None,
) -> Iterator[Wave]:
    """The resident experts of a layer, or those at some positions. Without counts they are the
    whole layer, and one wave; without `grouped` every expert is a wave of its own."""
    rows, counts = layer_pass.rows, layer_pass.rows.counts
    count = residents.counts[layer_pass.layer]
    weights = residents[layer_pass.layer].weights[:count]
    if counts is None:
        assert positions is None
        yield Wave(0, count, 0, rows.n_rows, weights, rows.ends_E, None)
        return
    starts = [0, *itertools.accumulate(counts)]
    pending = [
        Candidate(position, starts[position], counts[position], True, True)
        for position in range(count)
        if counts[position] and (positions is None or position in positions)
    ]
    while pending:
        number = next_wave(pending, max_rows, grouped)
        run = range(pending[0].position, pending[number - 1].position + 1)
        yield Wave.of(rows, starts, counts, run, weights[run.start : run.stop])
        pending = pending[number:]
