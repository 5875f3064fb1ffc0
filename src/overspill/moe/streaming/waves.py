"""The waves of a layer: experts that are on the device, or on their way, and compute together."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from overspill.core.experts import Phase
from overspill.moe.compute_trace import ComputeTrace
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.streaming.cpu_split import CpuSplit
from overspill.moe.streaming.expected_counts import CountSource
from overspill.moe.streaming.slot_plan import PlannedChunk, SlotPlan
from overspill.moe.streaming.step_cursor import StepCursor
from overspill.plan.waves import Candidate, first_of_wave, next_wave
from overspill.tiers.store import ExpertStore
from overspill.transfer.streams import StreamEvent, record_event, wait_event
from overspill.transfer.uploader import Target, Uploader


class WaveLimits(NamedTuple):
    """Limits of a wave."""

    grouped: bool  # several experts, or each by itself
    overlap: bool  # upload ahead of the chunk that is being computed
    max_rows: int


class Waves:
    """Tells the uploader which experts are needed next, and yields them as they arrive."""

    def __init__(
        self,
        store: ExpertStore,
        cursor: StepCursor,
        plan: SlotPlan,
        split: CpuSplit | None,
        uploader: Uploader,
        trace: ComputeTrace,
        device: torch.device,
    ) -> None:
        self._store = store
        self._sync = store.sync
        self._places = store.places
        self._cursor = cursor
        self._plan = plan
        self._split = split
        self._uploader = uploader
        self._trace = trace
        self._device = device
        self._slot_weights = store.memory.layout.weights(uploader.slab)
        self._stream: torch.cuda.Stream | None = None  # of the last pass
        self._focused = (-1, -1)  # the pass and the part of its layer that were needed last
        self._uploaded: list[int] = []  # the experts of this part, in the order of their uploads

    def of(
        self,
        layer_pass: LayerPass,
        phase: Phase,
        limits: WaveLimits,
        positions: Collection[int] | None = None,
    ) -> Iterator[Wave]:
        """A layer's experts, or those at some positions, wave by wave; compute one before asking
        for the next. One pass may ask several times, for different positions."""
        with self._sync.lock:
            self._plan.refresh()
        layer, counts = layer_pass.layer, layer_pass.device_counts
        starts = [0, *itertools.accumulate(counts)]
        # experts on disk share few host slots: they cannot all be on their way at once
        small = self._split is not None and self._split.is_small(counts, phase)
        wait_for_all = small and not self._places.disk_slots
        for part in range(self._plan.n_parts):
            pending = [
                p
                for p in self._plan.positions(layer, part)
                if counts[p] and (positions is None or p in positions)
            ]
            if pending:
                uploads = self._focus(part, limits.overlap)
                pending = [p for p in uploads if positions is None or p in positions]
            while pending:
                run, slots, events = self._await_wave(
                    layer, pending, counts, starts, limits, wait_for_all
                )
                for event in events:
                    wait_event(self._device, event)  # the compute stream itself, not the host
                first, stop = run[0], run[-1] + 1
                self._trace.begin_wave(f"{phase.value} {layer}.{first}-{stop - 1}")
                try:
                    yield Wave.of(
                        layer_pass.rows,
                        starts,
                        counts,
                        range(first, stop),
                        self._slot_weights[slots[0] : slots[-1] + 1],
                    )
                finally:  # also if the pass has failed: the device may still compute
                    self._trace.end_wave()
                    used = record_event(self._device)  # a slot may be filled again after this
                    with self._sync.lock:
                        self._uploader.release(slots, used)
                        self._cursor.finish(run)
                        self._store.disk.request_transfers()
                pending = [position for position in pending if position not in run]
        self._trace.leave_experts()

    def follow_stream(self) -> None:
        """Let the current stream wait for that of the last pass. Threads may use streams of their
        own; a slot knows its last reader only, so passes on different streams follow each other."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def _focus(self, part: int, ahead: bool) -> list[int]:
        """Tell the uploader that this part is needed now, and what follows it. Returns its experts
        in the order in which they are uploaded. If a pass asks again for the part, nothing is
        changed: experts that it has computed and updated would be uploaded again."""
        here = self._cursor.passes, part
        if here == self._focused:
            return self._uploaded
        with self._sync.lock:
            needed = self._cursor.chunks(part, self._plan.n_parts, ahead)
            planned = self._plan.follow(needed, self._uploads)
            layer, positions, _ = planned[0]
            self._store.disk.retry_reads(self._places.at(layer, position) for position in positions)
            self._uploader.set_targets(
                list(itertools.chain.from_iterable(map(self._targets, planned)))
            )
            self._store.disk.request_transfers()
            self._focused, self._uploaded = here, positions
            return positions

    def _uploads(self, layer: int, positions: range) -> list[int]:
        if self._split is not None:
            return self._split.uploads(layer, positions)
        busy = [position for position in self._cursor.busy(layer) if position in positions]
        remote = self._places.remote_experts.ids
        if not remote or self._cursor.expected(layer)[1] is CountSource.ROUTING:
            return busy
        # which rank computes a remote expert is not known, and its owner may be updating it
        return [position for position in busy if position < self._places.experts.n_local]

    def _targets(self, chunk: PlannedChunk) -> Iterator[Target]:
        counts, source = self._cursor.expected(chunk.layer)
        certain = source is CountSource.ROUTING
        if not certain and self._split is not None:
            certain = self._split.uploads_all(chunk.layer)
        elif not certain:
            certain = counts is not None and min(counts) >= 1
        for position, slot in zip(chunk.positions, chunk.slots, strict=True):
            yield Target(self._places.at(chunk.layer, position), slot, source.value, certain)

    def _await_wave(
        self,
        layer: int,
        pending: Sequence[int],
        counts: Sequence[int],
        starts: Sequence[int],
        limits: WaveLimits,
        wait_for_all: bool,
    ) -> tuple[list[int], list[int], list[StreamEvent]]:
        """Block until the upload of the first available expert of `pending` was issued (with
        `wait_for_all` of all), then takes the experts that may compute with it: (positions, slots,
        upload ends)."""
        uploader = self._uploader
        with self._sync.lock:
            self._store.disk.request_transfers()  # host slots of passed experts are free now
            slot_of = self._plan.slots(layer)
        pairs = {p: (self._places.at(layer, p), slot_of[p]) for p in pending}
        uploader.wait_issued(list(pairs.values()), every=wait_for_all)
        with self._sync.lock:
            issued = {p for p in pending if uploader.is_issued(*pairs[p])}
            order = sorted(pending)
            candidates = []
            for position in order:
                is_issued = position in issued
                arrived = is_issued and (wait_for_all or uploader.has_arrived(slot_of[position]))
                rows = starts[position], counts[position]
                candidates.append(Candidate(position, *rows, is_issued, arrived))
            lead = next(position for position in pending if position in issued)
            first = first_of_wave(candidates, order.index(lead))
            number = next_wave(candidates[first:], limits.max_rows, limits.grouped)
            run = order[first : first + number]
            slots = list(range(slot_of[run[0]], slot_of[run[-1]] + 1))
            return run, slots, uploader.end_events([slot_of[position] for position in run])

    def close(self) -> None:
        self._slot_weights = self._slot_weights.new_empty(0, self._slot_weights.shape[1])
