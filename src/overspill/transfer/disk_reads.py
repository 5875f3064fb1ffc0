"""Experts on disk that a decoding step needs now: they get host slots until it has used them."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from overspill.core.errors import DiskError, EngineError
from overspill.core.experts import ExpertId
from overspill.tiers.decoding_slots import DecodingSlots
from overspill.tiers.entry import Entry, Part
from overspill.tiers.store import ExpertStore
from overspill.tiers.worker_sync import WATCHDOG_SECONDS
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import Inject

_LANE = "ssd read"


class UsagePolicy(Protocol):
    """Scores the experts of one layer: those with the lowest scores leave host memory."""

    scores_LE: NDArray[np.floating[Any]]

    def use(self, experts_LN: NDArray[np.integer[Any]]) -> None:
        """These experts were needed now."""


class DiskReads:
    """Says where the weights of experts are, and what must be read first: the caller, one native
    thread, reads it. Nothing is read ahead."""

    def __init__(
        self,
        store: ExpertStore,
        policies: Sequence[UsagePolicy],
        recorder: Recorder,
        inject: Inject | None,
    ) -> None:
        """`policies` are those of the layers."""
        self._store = store
        self._slots = DecodingSlots(store)
        self._policies = policies
        self._scores_LE: list[list[float]] = [each.scores_LE[0].tolist() for each in policies]
        self._recorder = recorder
        self._inject = inject
        self._held: list[Entry] = []
        self._missing: list[Entry] = []
        self._began = 0

    @property
    def file(self) -> int:
        """The file descriptor of the weights."""
        return self._store.memory.files[Part.WEIGHTS].fd

    def hold(self, layer: int, experts: Sequence[int]) -> list[tuple[int, int]]:
        """The addresses of the weights of these experts, by their ids, valid until `release`; and
        where in the file they must be read from first, -1 if they are in host memory."""
        policy = self._policies[layer]
        policy.use(np.array([experts]))
        self._scores_LE[layer] = policy.scores_LE[0].tolist()
        entries = [self._store.entry(ExpertId(layer, expert)) for expert in experts]
        self._missing = self._hold(entries)
        self._held = entries
        if self._inject is not None:
            self._inject_faults(self._inject)
        self._began = time.perf_counter_ns()
        missing, size = set(self._missing), self._store.memory.size(Part.WEIGHTS)
        return [
            (
                self._store.host(entry, Part.WEIGHTS).data_ptr(),
                size * entry.disk_slot if entry in missing and entry.disk_slot is not None else -1,
            )
            for entry in entries
        ]

    def _inject_faults(self, inject: Inject) -> None:
        for entry in self._missing:
            try:
                inject(_LANE)
            except OSError as error:
                raise self._failed(entry, error) from error
            except BaseException:
                self._give_up()
                raise

    def _hold(self, entries: Sequence[Entry]) -> list[Entry]:
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while (missing := self._slots.hold(entries, self._in_order)) is None:
            if time.monotonic() > deadline:
                raise EngineError(f"no host slots were free for {len(entries)} experts")
            time.sleep(1e-4)  # transfers end soon
        return missing

    def _in_order(self, entries: Iterable[Entry]) -> list[Entry]:
        return sorted(entries, key=lambda entry: self._scores_LE[entry.id.layer][entry.id.index])

    def end_reads(self, failed: int, error: int) -> None:
        """What was missing was read, or reading the expert with index `failed` has failed with this
        `errno`, -1 for the end of the file."""
        if error:
            reason = self._store.memory.files[Part.WEIGHTS].read_error(error)
            raise self._failed(self._held[failed], reason)
        self._slots.end_reads(self._missing)
        size = len(self._missing) * self._store.memory.size(Part.WEIGHTS)
        if size:
            self._recorder.add_bytes(_LANE, size)
            label = f"{len(self._missing)} experts"
            self._recorder.host_span(_LANE, label, self._began, size)
        self._missing = []

    def _failed(self, entry: Entry, reason: OSError) -> DiskError:
        self._give_up()
        name = f"expert {entry.id.layer}.{entry.id.index}"
        return DiskError(f"{name} could not be read from disk: {reason}")

    def _give_up(self) -> None:
        self._slots.end_reads(self._missing, succeeded=False)
        self._missing = []
        self.release()

    def release(self) -> None:
        """The experts may leave host memory again."""
        held, self._held = self._held, []
        self._slots.release(held)
