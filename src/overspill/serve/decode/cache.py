"""Experts of host memory that also have a copy in memory of the GPU, chosen by their usage.

Nothing waits: the routing of a step is read when a later one begins, uploads run beside the steps,
and a copy is used by the steps that begin after it has arrived.
"""

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from overspill.moe.engine import Engine
from overspill.plan.eviction import Mask, Policy
from overspill.plan.slot_sizes import slot_sizes
from overspill.serve.decode.table import ExpertTable
from overspill.tiers.replicas import Replica
from overspill.transfer.driver import copy_on

_CHUNK = 1 << 28
_UPLOADS = 16
"""Uploads at a time."""
_MARGIN = 1.0
"""By how much the score of an expert exceeds that of the one whose slot it gets: an upload takes
bandwidth of host memory from the CPU."""

Key = tuple[int, int]
"""A layer, and an expert by its id."""


class _Upload(NamedTuple):
    key: Key
    slot: int


class _Copied(NamedTuple):
    """An upload, and of which weights: the number and the version of the expert's entry."""

    upload: _Upload
    number: int
    version: int


class _Copies:
    """Uploads that are being made."""

    def __init__(self) -> None:
        self.uploads: list[_Copied] = []
        self.end: torch.cuda.Event | None = None
        self.ended = False

    def done(self) -> bool:
        return self.ended or (self.end is not None and self.end.query())


class _Routing(NamedTuple):
    """The ids of the experts that a step has used, once `end` has passed."""

    ids_LBK: Tensor
    end: torch.cuda.Event | None


class _Step(NamedTuple):
    routing: _Routing
    present_LE: Mask


class ExpertCache:
    """GPU slots for any expert of any layer."""

    _stream: torch.cuda.Stream | None = None  # of an object whose __init__ has failed

    def __init__(
        self,
        engine: Engine,
        table: ExpertTable,
        n_slots: int,
        policy: Policy,
        chunk_bytes: int = _CHUNK,
        first: int = 0,
    ) -> None:
        """Memory is allocated, and given back, in chunks of about `chunk_bytes`. Steps use the
        layers from `first` on."""
        self._engine = engine
        self._table = table
        self._max_uploads = _UPLOADS
        self._first = first
        self._policy = policy
        self._chunk = max(1, chunk_bytes // engine.layout.weight_bytes)  # in slots
        self._slabs: list[Tensor] = []
        # of the records of each layer, and of each slot: a slot is for records that are no larger
        self._bytes_L = [engine.layout.weight_bytes_in(each) for each in range(engine.n_layers)]
        self._bytes_N: list[int] = []
        self._records: list[Tensor] = []
        self._sizes = slot_sizes(experts_by_size(engine, first))
        self._free: dict[int, list[int]] = {size: [] for size in sorted({*self._bytes_L})}
        # the slot of each expert that steps find here, or -1
        self._slots_LE = np.full((engine.n_layers, engine.n_experts), -1)
        self._planned: list[_Upload] = []
        self._uploading: deque[_Copies] = deque()
        self._replicas: dict[int, Replica] = {}  # copies in slots, by the numbers of their entries
        self._numbers: dict[Key, int] = {}
        self._was_lent = False
        self._moving: set[Key] = set()  # experts whose upload is planned or runs
        self._steps: deque[_Step] = deque()
        self._spare: list[_Routing] = []  # pinned memory, which steps use again
        self._layers_L1 = np.arange(engine.n_layers - first)[:, None]
        on_gpu = engine.device.type == "cuda"
        self._stream = torch.cuda.Stream(engine.device) if on_gpu else None
        self.hits_L = np.zeros(engine.n_layers - first)
        self.uses_L = np.zeros(engine.n_layers - first)
        self.n_missed = 0
        """Experts that steps have not found; one with several tokens of a step counts once."""
        with suppress(torch.OutOfMemoryError):  # memory is divided into pieces that are too small
            while self.n_slots < n_slots:
                self._extend(min(self._chunk, n_slots - self.n_slots))

    def _extend(self, count: int) -> None:
        sizes = [*itertools.islice(self._sizes, count)]
        with torch.inference_mode(False):
            slab = torch.empty(sum(sizes), dtype=torch.uint8, device=self._engine.device)
        self._slabs.append(slab)
        self._bytes_N += sizes
        for slot, record in enumerate(slab.split(sizes), self.n_slots):
            self._records.append(record)
            self._give(slot)

    def _give(self, slot: int) -> None:
        """Make a slot free."""
        self._free[self._bytes_N[slot]].append(slot)

    def _take(self, size: int) -> int | None:
        """Take a free slot for a record of `size` bytes, the smallest that is large enough."""
        for each, slots in self._free.items():
            if each >= size and slots:
                return slots.pop()
        return None

    def limit_uploads(self, host_slots: int | None) -> None:
        """Uploads may keep so many host slots (None: any) of experts on disk."""
        self._max_uploads = _UPLOADS if host_slots is None else min(_UPLOADS, host_slots)

    @property
    def n_slots(self) -> int:
        return len(self._records)

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def _record(self, slot: int) -> Tensor:
        return self._records[slot]

    def _address(self, slot: int) -> int:
        return self._record(slot).data_ptr()

    def shrink(self) -> bool:
        """Gives the memory of some slots back, when nothing is computed; False if there are none
        left."""
        self._wait()
        if not self._slabs:
            return False
        left = self._chunk * (len(self._slabs) - 1)
        for layer, expert in np.argwhere(self._slots_LE >= left).tolist():
            self._forget((layer, expert))
            self._table.set(layer, expert, None)
        self._table.apply()
        self._slabs.pop()
        del self._records[left:], self._bytes_N[left:]
        for slots in self._free.values():
            slots[:] = [slot for slot in slots if slot < left]
        return True

    def close(self) -> None:
        """Gives all memory back; no step follows."""
        self._wait()
        self._replicas.clear()
        self._records.clear()
        self._slabs.clear()

    def __del__(self) -> None:
        """Uploads may run when the LLM is given up: they write to memory that is free then, or read
        from it."""
        if self._stream is not None and not (self._engine.lifetime.forked or sys.is_finalizing()):
            self._wait_for_reads()
            self._stream.synchronize()

    def _wait(self) -> None:
        """Until every upload has ended."""
        self._cancel(self._planned)
        self._planned = []
        self._wait_for_reads()
        if self._stream is not None:
            torch.cuda.synchronize(self._engine.device)
        self._collect()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within it, passes of the model copy experts from here instead of uploading them."""
        self._collect()
        self._was_lent = True
        with self._engine.addresses.lent(self._replicas):
            yield

    def _wait_for_reads(self) -> None:
        """No slot is written to before copies out of it have ended."""
        if self._was_lent:
            self._engine.addresses.wait_for_uploads(self._stream)
            self._was_lent = False

    def follow_moves(self, addresses: list[list[int | None]], keep: bool = True) -> None:
        """Experts have moved to these addresses of the device, or away: those that live there need
        no slot. Without `keep`, weights have changed: no copy is right."""
        self._wait()
        for layer, row in enumerate(addresses):
            for expert, address in enumerate(row):
                slot = int(self._slots_LE[layer, expert])
                if slot >= 0 and address is None and keep:
                    address = self._address(slot)
                elif slot >= 0:
                    self._give(slot)
                    self._forget((layer, expert))
                self._table.set(layer, expert, address)

    def before_step(self) -> None:
        """A step begins: it uses what has arrived."""
        self._collect()
        self._table.apply()

    def after_step(self, ids_LBK: Tensor) -> None:
        """A step has begun that writes the ids of its experts there. While it runs, what earlier
        steps have missed is uploaded."""
        routing = self._take_routing(ids_LBK)
        if routing.end is not None:
            routing.ids_LBK.copy_(ids_LBK, non_blocking=True)
            routing.end.record()
        self._steps.append(_Step(routing, self._table.present[self._first :]))
        while self._steps and _has_ended(self._steps[0].routing.end):
            step = self._steps.popleft()
            self._learn(step)
            self._spare.append(step.routing)
        if self._planned:
            self._start_uploads()

    def _take_routing(self, ids_LBK: Tensor) -> _Routing:
        if self._stream is None:
            return _Routing(ids_LBK.clone(), None)
        while self._spare:
            spare = self._spare.pop()
            if spare.ids_LBK.shape == ids_LBK.shape:
                return spare
        host = torch.empty(ids_LBK.shape, dtype=ids_LBK.dtype, pin_memory=True)
        return _Routing(host, torch.cuda.Event())

    def _collect(self) -> None:
        """Steps may use what has been uploaded."""
        while self._uploading and self._uploading[0].done():
            for (key, slot), number, version in self._uploading.popleft().uploads:
                self._moving.discard(key)
                self._slots_LE[key] = slot
                self._table.set(*key, self._address(slot))
                self._numbers[key] = number
                self._replicas[number] = Replica(self._record(slot), version)

    def _forget(self, key: Key) -> None:
        """The expert is in no slot any more."""
        self._slots_LE[key] = -1
        self._replicas.pop(self._numbers.pop(key), None)

    def _learn(self, step: _Step) -> None:
        """Plans uploads of experts that a step has missed, those with the highest scores first."""
        ids_LN = step.routing.ids_LBK.numpy().reshape(len(step.routing.ids_LBK), -1)
        self._policy.use(ids_LN)
        found_LN = step.present_LE[self._layers_L1, ids_LN]
        self.hits_L += found_LN.sum(1)
        self.uses_L += ids_LN.shape[1]
        layers, places = np.nonzero(~found_LN)
        ids = ids_LN[layers, places]
        missed = {*zip((layers + self._first).tolist(), ids.tolist(), strict=True)}
        self.n_missed += len(missed)
        present_LE = self._table.present
        wanted = [key for key in missed - self._moving if not present_LE[key]]
        wanted.sort(key=lambda key: (-self._score(key), key))
        for key in wanted[: max(0, self._max_uploads - len(self._moving))]:
            slot = self._take(self._bytes_L[key[0]])
            if slot is None:
                slot = self._evict(self._score(key) - _MARGIN, self._bytes_L[key[0]])
            if slot is None and len(self._free) == 1:
                return  # nor does one with a lower score get any
            if slot is None:
                continue
            self._planned.append(_Upload(key, slot))
            self._moving.add(key)

    def _score(self, key: Key) -> float:
        return float(self._policy.scores_LE[key[0] - self._first, key[1]])

    def _evict(self, below: float, size: int) -> int | None:
        """The slot of `size` bytes or more of the expert with the lowest score, if that is low
        enough: the steps that follow do not find it."""
        cached = np.flatnonzero(self._slots_LE[self._first :] >= 0)
        if size > next(iter(self._free)):  # not all slots are large enough
            slots = self._slots_LE[self._first :].reshape(-1)[cached]
            cached = cached[np.array(self._bytes_N)[slots] >= size]
        if not len(cached):
            return None
        scores = self._policy.scores_LE.reshape(-1)[cached]
        lowest = int(scores.argmin())
        if scores[lowest] >= below:
            return None
        layer, expert = divmod(int(cached[lowest]), self._slots_LE.shape[1])
        key = layer + self._first, expert
        slot = int(self._slots_LE[key])
        self._forget(key)
        self._table.set(*key, None)
        return slot

    def _start_uploads(self) -> None:
        planned, self._planned = self._planned, []
        copies = _Copies()
        try:
            self._copy(planned, copies)
        except BaseException:
            copies.ended = True  # what has begun ends before the slots are used again
            self._cancel(planned)
            raise
        copied = {each.upload for each in copies.uploads}
        self._cancel([upload for upload in planned if upload not in copied])
        self._uploading.append(copies)

    def _cancel(self, uploads: list[_Upload]) -> None:
        for key, slot in uploads:
            self._give(slot)
            self._moving.discard(key)

    def _copy(self, planned: list[_Upload], copies: _Copies) -> None:
        """Begins to copy experts to their slots, without those that are on disk by now."""
        engine, inject = self._engine, self._engine.settings.inject
        self._wait_for_reads()
        if self._stream is not None:
            # steps that have begun may read what was in these slots; later ones do not find it
            self._stream.wait_stream(torch.cuda.current_stream(engine.device))
        for upload in planned:
            if inject is not None:
                inject("upload")
            source = engine.addresses.host_weights(*upload.key, copies)
            if source is None:
                continue
            memory = engine.layout.weights(self._record(upload.slot), upload.key[0])
            if self._stream is None:
                memory.copy_(source)
            else:
                copy_on(self._stream, memory, source)
            copies.uploads.append(_Copied(upload, *engine.addresses.version(*upload.key)))
        if self._stream is None:
            copies.ended = True
        else:
            end = torch.cuda.Event()
            end.record(self._stream)
            copies.end = end


def experts_by_size(engine: Engine, first: int = 0) -> dict[int, int]:
    """Return the number of experts of the layers from `first` on that do not live on the device, by
    the bytes of their records."""
    counts: dict[int, int] = {}
    for layer, residents in enumerate(engine.residents[first:], first):
        size = engine.layout.weight_bytes_in(layer)
        counts[size] = counts.get(size, 0) + engine.n_experts - residents
    return counts


def _has_ended(event: torch.cuda.Event | None) -> bool:
    return event is None or event.query()
