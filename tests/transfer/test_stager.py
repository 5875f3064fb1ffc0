"""The stager: a record that is read back is the one written last, whatever the order and delays."""

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overspill.core.errors import EngineError
from overspill.tiers.entry import Entry, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.stager import Stager
from overspill.transfer.streams import Inject
from tests.transfer.fakes import GatedEvent, disk_store, wait_until

BOTH = Part.WEIGHTS | Part.STATES


class Bench:
    """A stager whose needs are a list that the test sets."""

    def __init__(
        self,
        experts: int,
        permanent: int,
        cache: int,
        folder: Path,
        inject: Inject | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.store = disk_store(experts, permanent, cache, folder)
        self.store.allocate(Part.STATES)
        self.needs: list[tuple[Entry, Part]] = []
        self.stager = Stager(self.store, lambda: self.needs, 3, recorder or Recorder(), inject)

    def need(self, *experts: int, parts: Part = BOTH) -> None:
        with self.store.sync.lock:
            self.needs = [(self.store.places.entries[expert], parts) for expert in experts]
        self.stager.pump()

    def wait_for(self, expert: int, parts: Part = BOTH) -> Entry:
        entry = self.store.places.entries[expert]
        wait_until(self.store, lambda: entry.host_slot is not None and not parts & ~entry.valid)
        return entry

    def update(self, entry: Entry, value: int) -> None:
        """Changes a record as the update thread does."""
        self.store.hold(entry)
        for part in (Part.WEIGHTS, Part.STATES):
            self.store.host(entry, part).fill_((value + part) % 256)
        self.store.end_update(entry)
        self.store.release(entry)

    def in_host(self, *experts: int) -> list[bool]:
        return [self.store.places.entries[expert].host_slot is not None for expert in experts]

    def wait_idle(self) -> None:
        wait_until(self.store, self.stager.idle)

    def close(self) -> None:
        self.stager.close()
        self.store.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("overspill-ssd")]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(experts=5, permanent=0, cache=2, folder=tmp_path)
    yield bench
    bench.close()


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[tuple[int, int, int], list[tuple[list[int], bool]], int]:
    """(experts, permanent host slots, cache slots); then what is needed in which order, and whether
    the first of it is updated; and a seed for the delays."""
    experts = draw(st.integers(2, 7))
    permanent = draw(st.integers(0, experts - 1))
    cache = draw(st.integers(1, experts))
    needs = st.lists(st.integers(0, experts - 1), min_size=1, max_size=6)
    return (
        (experts, permanent, cache),
        draw(st.lists(st.tuples(needs, st.booleans()), max_size=14)),
        draw(st.integers(0, 1000)),
    )


@settings(max_examples=40)
@given(scenarios())
def test_a_record_that_is_read_back_is_the_one_written_last(
    scenario: tuple[tuple[int, int, int], list[tuple[list[int], bool]], int],
) -> None:
    sizes, steps, seed = scenario
    delay = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(*sizes, Path(folder), lambda _: time.sleep(delay.random() * 2e-3))
        store = bench.store
        expected = {}
        for entry in store.places.entries:
            expected[entry] = entry.number * 8
            for part in (Part.WEIGHTS, Part.STATES):
                store.write_part(entry, part, lambda m, v=entry.number * 8 + part: m.fill_(v))
        for number, (needs, updated) in enumerate(steps):
            bench.need(*needs)
            entry = bench.wait_for(needs[0])
            for part in (Part.WEIGHTS, Part.STATES):
                _check(store.host(entry, part), expected[entry] + part)
            if updated:
                expected[entry] = 64 + 8 * number
                bench.update(entry, expected[entry])
        bench.need()
        bench.wait_idle()
        store.places.check_conserved()
        for entry, value in expected.items():
            for part in (Part.WEIGHTS, Part.STATES):
                _check(store.read_part(entry, part), value + part)
            assert not entry.dirty, "an expert that is not needed is written back"
        bench.close()


def _check(memory: Tensor, value: int) -> None:
    assert torch.equal(memory, torch.full_like(memory, value % 256))


class SlowWrites(Recorder):
    """Holds a write back after its bytes were written, until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.go = threading.Event(), threading.Event()

    def span(self, row: str, name: str, bytes: int = 0) -> AbstractContextManager[object]:
        return self._after_write() if row == "ssd write" else super().span(row, name, bytes)

    @contextmanager
    def _after_write(self) -> Iterator[None]:
        yield
        self.written.set()
        assert self.go.wait(60)


def test_an_update_during_the_write_back_of_the_one_before_is_not_lost(tmp_path: Path) -> None:
    recorder = SlowWrites()
    bench = Bench(5, 0, 2, tmp_path, recorder=recorder)
    bench.need(0)
    entry = bench.wait_for(0)
    bench.update(entry, 10)
    bench.need(1)  # 0 is not needed any more: it is written back
    assert recorder.written.wait(60)
    bench.update(entry, 20)
    recorder.go.set()
    bench.need(1, 2)
    bench.wait_for(1)
    bench.wait_for(2)  # both host slots were given to others
    bench.need(0)
    _check(bench.store.host(bench.wait_for(0), Part.WEIGHTS), 20 + Part.WEIGHTS)
    bench.close()


def test_host_slots_hold_what_is_needed_next_and_no_more_is_read(bench: Bench) -> None:
    bench.need(3, 1, 4)
    bench.wait_for(3)
    bench.wait_for(1)
    bench.wait_idle()
    assert bench.in_host(0, 1, 2, 3, 4) == [False, True, False, True, False]
    bench.store.places.check_conserved()


def test_only_the_parts_that_are_needed_are_read(bench: Bench) -> None:
    bench.need(3, parts=Part.WEIGHTS)
    assert bench.wait_for(3, Part.WEIGHTS).valid == Part.WEIGHTS
    bench.wait_idle()
    bench.need(3)
    assert bench.wait_for(3).valid == BOTH


def test_experts_that_live_in_host_memory_are_not_transferred(tmp_path: Path) -> None:
    recorder = Recorder()
    bench = Bench(3, 2, 1, tmp_path, recorder=recorder)
    bench.need(*(entry.number for entry in bench.store.places.entries if entry.disk_slot is None))
    bench.wait_idle()
    bench.close()
    assert recorder.counters() == {}


def test_the_least_recently_needed_is_evicted_first(bench: Bench) -> None:
    bench.need(0, 1)
    bench.wait_for(0)
    bench.wait_for(1)
    bench.need(1)  # 1 was needed after 0
    bench.need(2)
    bench.wait_for(2)
    assert bench.in_host(0, 1) == [False, True]


def test_an_expert_keeps_its_host_slot_while_it_is_uploaded_or_held(bench: Bench) -> None:
    bench.need(0, 1)
    uploaded, held = bench.wait_for(0), bench.wait_for(1)
    upload = GatedEvent()
    bench.store.begin_upload(uploaded)
    bench.store.hold(held)
    bench.need(2, 3)
    bench.wait_idle()
    assert bench.in_host(0, 1, 2, 3) == [True, True, False, False]
    bench.store.end_upload(uploaded, upload)
    bench.stager.pump()
    bench.wait_idle()
    assert bench.in_host(0, 2) == [True, False], "issued, but not ended"
    upload.open()
    bench.store.upload_done(uploaded)
    bench.wait_for(2)
    assert bench.in_host(0) == [False]
    bench.store.release(held)
    bench.wait_for(3)


def test_a_later_expert_does_not_take_the_slot_of_a_sooner_one(tmp_path: Path) -> None:
    """The sooner one needs a slot; the later one, in host memory already, needs its states."""
    recorder = Recorder()
    bench = Bench(5, 0, 2, tmp_path, recorder=recorder)
    bench.need(0, 1, parts=Part.WEIGHTS)
    held = bench.wait_for(0, Part.WEIGHTS)
    bench.wait_for(1, Part.WEIGHTS)
    bench.store.hold(held)
    read = recorder.counters()["ssd read"]
    bench.need(2, 1)  # 2 has to wait for the slot that is held
    bench.wait_idle()
    assert bench.in_host(1, 2) == [True, False]
    assert recorder.counters()["ssd read"] == read, "reads start in the order of need"
    bench.store.release(held)
    bench.wait_for(2)
    bench.wait_for(1)
    bench.close()


@pytest.mark.parametrize("kind", ["ssd read", "ssd write"])
def test_a_failed_transfer_is_raised_where_its_record_is_awaited(kind: str, tmp_path: Path) -> None:
    def fail(what: str) -> None:
        if what == kind:
            raise OSError("no disk")

    bench = Bench(3, 0, 1, tmp_path, fail)
    with pytest.raises(EngineError, match="no disk"):
        _write_back(bench)
    bench.close()


def _write_back(bench: Bench) -> None:
    bench.need(0)
    bench.update(bench.wait_for(0), 1)
    bench.need(1)
    bench.wait_for(1)


def test_closing_during_transfers_ends_the_threads(tmp_path: Path) -> None:
    bench = Bench(5, 0, 2, tmp_path, lambda _: time.sleep(0.02))
    bench.need(0, 1)
    bench.update(bench.wait_for(0), 1)
    bench.need(2, 3, 4)
    bench.close()
    assert bench.store.sync.error is None


def test_an_update_gets_its_states_while_a_sooner_expert_waits_for_a_slot(bench: Bench) -> None:
    """Both slots are held by updates that wait for states: only then is a slot free."""
    bench.need(0, 1, parts=Part.WEIGHTS)
    held = [bench.wait_for(expert, Part.WEIGHTS) for expert in (0, 1)]
    for entry in held:
        bench.store.hold(entry)
    first, second = bench.store.places.entries[2], held[0]
    with bench.store.sync.lock:
        bench.needs = [(first, Part.WEIGHTS), (second, BOTH)]
    bench.stager.pump()
    bench.wait_for(0)
    with bench.store.sync.lock:  # updated
        bench.needs = [(first, Part.WEIGHTS)]
    bench.store.release(second)
    bench.wait_for(2, Part.WEIGHTS)
    assert bench.in_host(0, 1, 2) == [False, True, True]
    bench.store.release(held[1])
