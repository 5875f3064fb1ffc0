"""Experts that are all on the compute device: a whole layer is one wave."""

import itertools
from collections.abc import Iterator

from torch import Tensor

from overspill.core.expert_map import ExpertMap
from overspill.core.experts import Phase
from overspill.moe.compute import ExpertCompute
from overspill.moe.dispatch import Dispatcher
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.resident.memory import ResidentMemory
from overspill.plan.waves import Candidate, next_wave


class ResidentCompute(ExpertCompute):
    """No slots and no transfers. With `grouped` off every expert is a wave of its own."""

    def __init__(
        self,
        n_layers: int,
        experts: ExpertMap,
        memory: ResidentMemory,
        dispatcher: Dispatcher,
        max_rows: int,
        grouped: bool,
    ) -> None:
        super().__init__(
            n_layers, experts, memory.layout.shape, memory.device, dispatcher, max_rows
        )
        self._memory = memory
        self._grouped = grouped

    def set_grouped(self, grouped: bool) -> None:
        self._grouped = grouped

    def enter_forward(
        self, layer_pass: LayerPass, expert_ids_TK: Tensor, phase: Phase, keep: bool
    ) -> None:
        self._memory.lifetime.check()
        # one wave holds the whole layer if its activations fit: then the host needs no counts
        many = expert_ids_TK.numel() > self.max_rows
        need_counts = self.device.type == "cpu" or many or not self._grouped
        layer_pass.order = self.dispatcher.route(expert_ids_TK, layer_pass.drops, need_counts)

    def enter_backward(self, layer_pass: LayerPass) -> None:
        self._memory.lifetime.check()

    def waves(self, layer_pass: LayerPass, phase: Phase) -> Iterator[Wave]:
        rows, counts = layer_pass.rows, layer_pass.rows.counts
        n_local = self.experts.n_local
        base = layer_pass.layer * n_local
        weights = self._memory.weights
        if counts is None:
            records = weights[base : base + n_local]
            yield Wave(0, n_local, 0, rows.n_rows, records, rows.ends_E, None)
            return
        starts = [0, *itertools.accumulate(counts)]
        pending = [
            Candidate(position, base + position, starts[position], count, True, True)
            for position, count in enumerate(counts)
            if count
        ]
        while pending:
            number = next_wave(pending, self.max_rows, self._grouped)
            first, stop = pending[0].position, pending[number - 1].position + 1
            yield Wave(
                first,
                stop,
                starts[first],
                starts[stop],
                weights[base + first : base + stop],
                rows.ends_E[first:stop] - starts[first],
                counts[first:stop],
            )
            pending = pending[number:]
