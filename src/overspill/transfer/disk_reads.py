"""Reads of experts on disk for decoding steps, into host slots that are held while a step uses
them."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from overspill.core.errors import DiskError, EngineError
from overspill.core.experts import ExpertId
from overspill.tiers.decoding_slots import DecodingSlots
from overspill.tiers.entry import Entry, Part
from overspill.tiers.ssd import ARRIVING, PRESENT
from overspill.tiers.store import ExpertStore
from overspill.tiers.worker_sync import WATCHDOG_SECONDS
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import Inject

_LANE = "ssd read"
_MOST_USED = 1024


class UsagePolicy(Protocol):
    """Scores of the experts of one layer: experts with the lowest scores leave host memory."""

    scores_LE: NDArray[np.floating[Any]]

    def use(self, experts_LN: NDArray[np.integer[Any]]) -> None:
        """Record that these experts were needed now."""


class DiskReads:
    """Host addresses of the weights of experts, and the reads that must come before their use. The
    caller, one native thread, carries out the reads. Experts that a later layer is expected to need
    are read ahead."""

    def __init__(
        self,
        store: ExpertStore,
        policies: Sequence[UsagePolicy],
        recorder: Recorder,
        inject: Inject | None,
    ) -> None:
        """`policies` has one for each layer."""
        self._store = store
        self._places = store.places
        self._slots = DecodingSlots(store)
        self._policies = policies
        self._scores_LE: list[list[float]] = [each.scores_LE[0].tolist() for each in policies]
        self._recorder = recorder
        self._inject = inject
        # experts that were read ahead, or are being read, by layer
        self._expected: dict[int, set[Entry]] = {}
        self._began_ahead: dict[Entry, int] = {}  # when their reads began
        self._held: list[Entry] = []
        self._missing: list[Entry] = []
        self._ahead: list[Entry] = []  # held experts that are being read ahead
        self._began = 0
        self._used: list[tuple[int, list[int]]] = []  # layers and experts, to be learnt from
        self._order: list[Entry] = []  # in which experts lose their slots, from the last `learn`

    @property
    def file(self) -> int:
        """The file descriptor of the weights."""
        return self._store.memory.files[Part.WEIGHTS].fd

    def hold(self, layer: int, experts: Sequence[int]) -> list[tuple[int, int]]:
        """Return the addresses of the weights of these experts, by their ids, valid until
        `release`, each with the offset in the file from which the weights must be read first; or
        with PRESENT if they are in host memory, or ARRIVING if they will be when `end_reads`
        returns."""
        self._used.append((layer, list(experts)))
        if len(self._used) == _MOST_USED:  # nothing was read for long
            self.learn()
        entries = [self._places.entry(ExpertId(layer, expert)) for expert in experts]
        expected, needed = self._expected.pop(layer, set()), set(entries)
        self._order[:0] = [entry for entry in expected if entry not in needed]
        self._missing = self._hold(entries, expected)
        self._held = entries
        if self._inject is not None:
            self._inject_faults(self._inject)
        missing = set(self._missing)
        self._ahead = [e for e in entries if e not in missing and not e.valid & Part.WEIGHTS]
        self._began = time.perf_counter_ns()
        return [(self._store.host(e, Part.WEIGHTS).data_ptr(), self._source(e)) for e in entries]

    def _source(self, entry: Entry) -> int:
        if entry in self._missing:
            return self._offset(entry)
        return ARRIVING if entry in self._ahead else PRESENT

    def _offset(self, entry: Entry) -> int:
        assert entry.disk_slot is not None
        return self._store.memory.files[Part.WEIGHTS].offsets[entry.disk_slot]

    def _inject_faults(self, inject: Inject) -> None:
        for entry in self._missing:
            try:
                inject(_LANE)
            except OSError as error:
                raise self._failed(entry, error) from error
            except BaseException:
                self._abort()
                raise

    def _hold(self, entries: Sequence[Entry], expected: set[Entry]) -> list[Entry]:
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while (missing := self._slots.hold(entries, self._order, expected)) is None:
            if time.monotonic() > deadline:
                raise EngineError(f"no host slots were free for {len(entries)} experts")
            self.learn()
            time.sleep(1e-4)  # transfers end soon
        return missing

    def learn(self) -> None:
        """Pass the use of experts on to the policies. This takes longer than finding the experts of
        a request: the caller does it while it reads."""
        while self._used:
            layer, experts = self._used.pop(0)
            policy = self._policies[layer]
            policy.use(np.array([experts]))
            self._scores_LE[layer] = policy.scores_LE[0].tolist()
        scores = self._scores_LE
        with self._store.sync.lock:
            self._order = list(self._places.cached())
        self._order.sort(key=lambda entry: scores[entry.id.layer][entry.id.index])

    def expect(self, layer: int, experts: Iterable[int]) -> list[tuple[int, int]]:
        """Give host slots to experts that a later layer than that of `hold` is likely to need.
        Returns the address of each and the offset in the file to read it from, before `end_ahead`;
        or PRESENT if it is in host memory already, or gets no host slot."""
        entries = [self._places.entry(ExpertId(layer, expert)) for expert in experts]
        others = {entry for layer in self._expected.values() for entry in layer}
        begun = set(self._slots.begin_reads(entries, self._order, others))
        self._expected.setdefault(layer, set()).update(begun)
        now = time.perf_counter_ns()
        self._began_ahead.update(dict.fromkeys(begun, now))
        return [
            (self._store.host(e, Part.WEIGHTS).data_ptr(), self._offset(e))
            if e in begun
            else (0, PRESENT)
            for e in entries
        ]

    def end_ahead(self, layer: int, expert: int, error: int) -> None:
        """End the read of an expected expert. `error` is 0, an `errno`, or -1 for the end of the
        file: after an error the step that needs the expert reads it again. Any thread may call
        this."""
        entry = self._places.entry(ExpertId(layer, expert))
        succeeded = False
        try:
            if self._inject is not None:
                self._inject(_LANE)
            succeeded = not error
        except OSError:
            pass
        finally:
            began, size = self._began_ahead.pop(entry), self._store.weight_bytes[layer]
            self._slots.end_reads([entry], succeeded)
        if succeeded:
            self._recorder.add_bytes(_LANE, size)
            self._recorder.host_span(_LANE, f"ahead {layer}.{expert}", began, size)

    def end_reads(self, failed: int, error: int) -> None:
        """End the reads of missing experts. If `error` is not 0, the read of the expert with index
        `failed` has failed with this `errno`, -1 for the end of the file."""
        if error:
            entry, sizes = self._held[failed], self._store.weight_bytes
            file = self._store.memory.files[Part.WEIGHTS]
            raise self._failed(entry, file.read_error(error, sizes[entry.id.layer]))
        self._slots.end_reads(self._missing)
        size = sum(self._store.weight_bytes[entry.id.layer] for entry in self._missing)
        if size:
            self._recorder.add_bytes(_LANE, size)
            label = f"{len(self._missing)} experts"
            self._recorder.host_span(_LANE, label, self._began, size)
        self._missing = []
        self._await_ahead()

    def _await_ahead(self) -> None:
        """Block until experts that are being read ahead have arrived. Read them now if that read
        has failed."""
        deadline = time.monotonic() + WATCHDOG_SECONDS
        for entry in self._ahead:
            while entry.io & Part.WEIGHTS:
                if time.monotonic() > deadline:
                    self._abort()
                    raise EngineError("an expert that was read ahead has not arrived")
                time.sleep(2e-5)
            if not entry.valid & Part.WEIGHTS and entry.disk_slot is not None:
                memory = self._store.host(entry, Part.WEIGHTS)
                try:
                    self._store.memory.files[Part.WEIGHTS].read(entry.disk_slot, memory)
                except OSError as error:
                    raise self._failed(entry, error) from error
                self._slots.end_reads([entry])

    def _failed(self, entry: Entry, reason: OSError) -> DiskError:
        self._abort()
        name = f"expert {entry.id.layer}.{entry.id.index}"
        return DiskError(f"{name} could not be read from disk: {reason}")

    def _abort(self) -> None:
        self._slots.end_reads(self._missing, succeeded=False)
        self._missing = []
        self.release()

    def release(self) -> None:
        """Let the held experts leave host memory again."""
        held, self._held = self._held, []
        self._slots.release(held)

    def wait_released(self) -> None:
        """Block until no expert is held, after a step has ended."""
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while self._held and time.monotonic() < deadline:
            time.sleep(1e-5)
