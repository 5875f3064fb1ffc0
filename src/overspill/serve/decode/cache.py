"""Experts of host memory that also have a copy in memory of the GPU, chosen by their usage.

Nothing waits: the routing of a step is read when a later one begins, uploads run beside the steps,
and a copy is used by the steps that begin after it has arrived.
"""

from collections import deque
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from overspill.moe.engine import Engine
from overspill.plan.eviction import Mask, NextUse, Policy
from overspill.serve.decode.table import ExpertTable
from overspill.transfer.driver import copy_on

_CHUNK = 1 << 28
_UPLOADS = 8
"""Uploads at a time: more would take host memory's bandwidth from the CPU."""
_MARGIN = 0.1
"""By how much the score of an expert exceeds that of the one whose slot it gets."""

Key = tuple[int, int]
"""A layer, and an expert by its id."""


class _Upload(NamedTuple):
    key: Key
    slot: int


class _Uploading(NamedTuple):
    """Uploads that run, until `end` has passed."""

    uploads: list[_Upload]
    end: torch.cuda.Event | None  # None: they have ended


class _Step(NamedTuple):
    """The experts that a step has used, once `end` has passed."""

    ids_LBK: Tensor
    present_LE: Mask
    end: torch.cuda.Event | None


class ExpertCache:
    """GPU slots for any expert of any layer."""

    def __init__(
        self,
        engine: Engine,
        table: ExpertTable,
        n_slots: int,
        policy: Policy | None = None,
        chunk_bytes: int = _CHUNK,
    ) -> None:
        """Memory is allocated, and given back, in chunks of about `chunk_bytes`."""
        self._engine = engine
        self._table = table
        self._policy = policy or NextUse(engine.n_layers, engine.n_experts)
        self._chunk = max(1, chunk_bytes // engine.layout.weight_bytes)  # in slots
        self._slabs: list[Tensor] = []
        self._n_slots = 0
        self._free: list[int] = []
        self._slots: dict[Key, int] = {}  # experts that steps find here
        self._planned: list[_Upload] = []
        self._uploading: deque[_Uploading] = deque()
        self._steps: deque[_Step] = deque()
        on_gpu = engine.device.type == "cuda"
        self._stream = torch.cuda.Stream(engine.device) if on_gpu else None
        self.hits_L = np.zeros(engine.n_layers)
        self.uses_L = np.zeros(engine.n_layers)
        with suppress(torch.OutOfMemoryError):  # memory is divided into pieces that are too small
            while self._n_slots < n_slots:
                self._extend(min(self._chunk, n_slots - self._n_slots))

    def _extend(self, count: int) -> None:
        shape = count, self._engine.shape.numel
        with torch.inference_mode(False):
            slab = torch.empty(shape, dtype=self._engine.dtype, device=self._engine.device)
        self._slabs.append(slab)
        self._free += range(self._n_slots, self._n_slots + count)
        self._n_slots += count

    @property
    def n_slots(self) -> int:
        return self._n_slots

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def _memory(self, slot: int) -> Tensor:
        return self._slabs[slot // self._chunk][slot % self._chunk]

    def shrink(self) -> bool:
        """Gives the memory of some slots back, when nothing is computed; False if there are none
        left."""
        self._wait()
        if not self._slabs:
            return False
        self._n_slots -= len(self._slabs[-1])
        for key, slot in list(self._slots.items()):
            if slot >= self._n_slots:
                del self._slots[key]
                self._table.set(*key, None)
        self._table.apply()
        self._slabs.pop()
        self._free = [slot for slot in self._free if slot < self._n_slots]
        return True

    def _wait(self) -> None:
        """Until every upload has ended."""
        for _, slot in self._planned:
            self._free.append(slot)
        self._planned.clear()
        if self._stream is not None:
            torch.cuda.synchronize(self._engine.device)
        self._collect()

    def follow_moves(self, addresses: list[list[int | None]]) -> None:
        """Experts have moved to these addresses of the device, or away: those that live there need
        no slot."""
        self._wait()
        for layer, row in enumerate(addresses):
            for expert, address in enumerate(row):
                slot = self._slots.get((layer, expert))
                if slot is not None and address is None:
                    address = self._memory(slot).data_ptr()
                elif slot is not None:
                    self._free.append(self._slots.pop((layer, expert)))
                self._table.set(layer, expert, address)

    def before_step(self) -> None:
        """A step begins: uses what has arrived, and starts to upload what will be used most."""
        self._collect()
        while self._steps and _has_ended(self._steps[0].end):
            self._learn(self._steps.popleft())
        self._table.apply()
        if self._planned:
            self._start_uploads()

    def after_step(self, ids_LBK: Tensor) -> None:
        """A step has begun that writes the ids of its experts there."""
        present = self._table.present
        if self._stream is None:
            self._steps.append(_Step(ids_LBK.clone(), present, None))
            return
        host = torch.empty(ids_LBK.shape, dtype=ids_LBK.dtype, pin_memory=True)
        host.copy_(ids_LBK, non_blocking=True)
        end = torch.cuda.Event()
        end.record()
        self._steps.append(_Step(host, present, end))

    def _collect(self) -> None:
        """Steps may use what has been uploaded."""
        while self._uploading and _has_ended(self._uploading[0].end):
            for key, slot in self._uploading.popleft().uploads:
                self._slots[key] = slot
                self._table.set(*key, self._memory(slot).data_ptr())

    def _learn(self, step: _Step) -> None:
        """Plans uploads of experts that a step has missed."""
        ids_LN = step.ids_LBK.reshape(len(step.ids_LBK), -1).numpy()
        self._policy.use(ids_LN)
        found_LN = step.present_LE[np.arange(len(ids_LN))[:, None], ids_LN]
        self.hits_L += found_LN.sum(1)
        self.uses_L += ids_LN.shape[1]
        missed = zip(*np.nonzero(~found_LN), strict=True)
        missing = {(int(layer), int(ids_LN[layer, at])) for layer, at in missed}
        on_their_way = {key for each in self._uploading for key, _ in each.uploads}
        on_their_way |= {key for key, _ in self._planned}
        scores_LE = self._policy.scores_LE
        present_LE = self._table.present
        wanted = {key for key in missing - on_their_way if not present_LE[key]}
        for key in sorted(wanted, key=lambda key: -scores_LE[key]):
            if len(on_their_way) >= _UPLOADS:
                break
            slot = self._take_slot(float(scores_LE[key]) - _MARGIN)
            if slot is None:
                break
            self._planned.append(_Upload(key, slot))
            on_their_way.add(key)

    def _start_uploads(self) -> None:
        planned, self._planned = self._planned, []
        sources = [self._engine.host_weights(*key) for key, _ in planned]
        if self._stream is None:
            for (_, slot), source in zip(planned, sources, strict=True):
                self._memory(slot).copy_(source)
            self._uploading.append(_Uploading(planned, None))
            return
        # steps that have begun may still read what was in these slots
        self._stream.wait_stream(torch.cuda.current_stream(self._engine.device))
        for (_, slot), source in zip(planned, sources, strict=True):
            copy_on(self._stream, self._memory(slot), source)
        end = torch.cuda.Event()
        end.record(self._stream)
        self._uploading.append(_Uploading(planned, end))

    def _take_slot(self, score: float) -> int | None:
        """A slot that is free, or whose expert has a lower score than `score`."""
        if self._free:
            return self._free.pop()
        if not self._slots:
            return None
        keys = np.array(list(self._slots))
        scores = self._policy.scores_LE[keys[:, 0], keys[:, 1]]
        lowest = int(scores.argmin())
        if scores[lowest] >= score:
            return None
        key = (int(keys[lowest, 0]), int(keys[lowest, 1]))
        slot = self._slots.pop(key)
        self._table.set(*key, None)
        return slot


def _has_ended(event: torch.cuda.Event | None) -> bool:
    return event is None or event.query()
