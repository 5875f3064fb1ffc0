"""The waves of a layer: experts that are on the device, or on their way, and compute together."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.core.experts import Phase
from overspill.moe.compute_trace import ComputeTrace
from overspill.moe.course import Course
from overspill.moe.lookahead import Knowledge
from overspill.moe.passes import LayerPass, Wave
from overspill.moe.residency import Residency, Resident
from overspill.moe.settings import Settings
from overspill.moe.sharing import Sharing
from overspill.plan.waves import Candidate, first_of_wave, next_wave
from overspill.tiers.store import ExpertStore
from overspill.transfer.lanes import Mark, compute_mark, compute_waits
from overspill.transfer.loader import Loader, Target
from overspill.transfer.stager import Stager


class _Terms(NamedTuple):
    """What a wave may be."""

    patient: bool  # all experts together, once all are on their way
    together: bool  # several experts, or each by itself
    max_rows: int


class Waves:
    """Tells the loader what is needed next, and takes experts as they come."""

    def __init__(
        self,
        store: ExpertStore,
        course: Course,
        residency: Residency,
        sharing: Sharing,
        loader: Loader,
        stager: Stager | None,
        trace: ComputeTrace,
        device: torch.device,
    ) -> None:
        self.store = store
        self.course = course
        self.residency = residency
        self.sharing = sharing
        self.loader = loader
        self.stager = stager
        self.device = device
        self.trace = trace
        self._slot_weights = store.layout.weights(loader.slab)

    def of(
        self, layer_pass: LayerPass, phase: Phase, settings: Settings, max_rows: int
    ) -> Iterator[Wave]:
        """A layer's experts, wave by wave; compute one before the next. At most `max_rows` rows of
        tokens in each."""
        layer, counts = layer_pass.layer, layer_pass.device_counts
        permutation = layer_pass.permutation
        assert permutation is not None
        starts = [0, *itertools.accumulate(counts)]
        # experts on disk take turns in few rows: they cannot all be on their way at once
        patient = not self.store.disk_rows and self.sharing.is_small(counts, phase)
        terms = _Terms(patient, settings.waves, max_rows)
        for part in range(self.residency.n_parts):
            pending = [index for index in self.residency.experts(part) if counts[index]]
            if pending:
                pending = self._focus(part, settings.overlap_uploads)
            while pending:
                run, slots, marks = self._await_wave(layer, pending, counts, starts, terms)
                for mark in marks:
                    compute_waits(self.device, mark)  # the compute stream itself, not the host
                first, stop = run[0], run[-1] + 1
                self.trace.begin_wave(f"{phase.value} {layer}.{first}-{stop - 1}")
                yield Wave(
                    first,
                    stop,
                    starts[first],
                    starts[stop],
                    self._slot_weights[slots[0] : slots[-1] + 1],
                    _from_zero(permutation.ends_E[first:stop], starts[first]),
                    counts[first:stop],
                )
                self.trace.end_wave()
                used = compute_mark(self.device)  # a slot may be filled anew once this has passed
                with self.store.lock:
                    for slot in slots:
                        self.loader.slots[slot].free = used
                        self.loader.slots[slot].used = True
                    self.course.leave(run)
                    if self.stager is not None:
                        self.stager.pump()  # the CPU may wait for the rows that are free now
                pending = [index for index in pending if index not in run]
        self.trace.leave_experts()

    def _focus(self, part: int, ahead: bool) -> list[int]:
        """Tells the loader and the stager that this part is needed now, and what follows it; its
        experts in the order in which they are uploaded."""
        with self.store.lock:
            needed = self.course.chunks(part, self.residency.n_parts, ahead)
            residents = self.residency.follow(needed, self.sharing.uploads)
            self.loader.set_targets(
                list(itertools.chain.from_iterable(map(self._targets, residents)))
            )
            if self.stager is not None:
                self.stager.pump()
            return residents[0].indices

    def _targets(self, resident: Resident) -> Iterator[Target]:
        layer, indices, slots = resident
        _, known = self.course.expected(layer)
        sure = known is Knowledge.REAL or self.sharing.takes_all(layer)
        for index, slot in zip(indices, slots, strict=True):
            yield Target(self.store.at(layer, index), slot, known.value, sure)

    def _await_wave(
        self,
        layer: int,
        pending: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
        terms: _Terms,
    ) -> tuple[list[int], list[int], list[Mark]]:
        """Blocks until one of `pending`, the first that can be had, is on its way to its slot (with
        patience, until all are), then takes as many as may compute with it: (indices, slots, ends
        of their uploads)."""
        loader = self.loader
        with self.store.lock:
            if self.stager is not None:
                self.stager.pump()  # rows of experts that were passed are free for those to come
            slot_of = self.residency.slots(layer)
        pairs = {index: (self.store.at(layer, index), slot_of[index]) for index in pending}
        loader.await_issued(list(pairs.values()), every=terms.patient)
        with self.store.lock:
            issued = {index for index in pending if loader.fresh(*pairs[index])}
            order = sorted(pending)
            candidates = []
            for index in order:
                slot, is_here = slot_of[index], index in issued
                arrived = is_here and (terms.patient or loader.arrived(slot))
                rows = starts[index], counts[index]
                candidates.append(Candidate(index, slot, *rows, is_here, arrived))
            lead = next(index for index in pending if index in issued)
            first = first_of_wave(candidates, order.index(lead))
            number = next_wave(candidates[first:], terms.max_rows, terms.together)
            run = order[first : first + number]
            slots = list(range(slot_of[run[0]], slot_of[run[-1]] + 1))
            return run, slots, loader.ends([slot_of[index] for index in run])

    def close(self) -> None:
        self._slot_weights = self._slot_weights.new_empty(0, self._slot_weights.shape[1])


def _from_zero(ends: Tensor, start: int) -> Tensor:
    return ends - start if start else ends
