"""Both uploaders: the right weights in the right slot, most urgent first, never over one in use."""

import random
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overspill.core.errors import EngineError
from overspill.tiers.slab import device_slab
from overspill.tiers.store import Part
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import CopyStream, StreamEvent, record_event
from overspill.transfer.thread_uploader import ThreadUploader
from overspill.transfer.uploader import Target
from tests.transfer.fakes import (
    CPU,
    LAYOUT,
    GatedEvent,
    disk_store,
    host_store,
    rewrite,
    value_of,
)
from tests.transfer.upload_bench import HALVES, KINDS, RECORD, Bench, needs_compiler
from tests.waiting import wait_until


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param, experts=4, slots=3)
    yield bench
    bench.close()


@pytest.fixture(params=KINDS)
def slow(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Records of two pieces that arrive when the test says so."""
    bench = Bench(request.param, experts=6, slots=6, sizes=HALVES, at_once=False)
    yield bench
    bench.close()


# -- what is uploaded -------------------------------------------------------------------------


def test_uploads_follow_the_order_of_need(bench: Bench) -> None:
    bench.target((2, 0), (0, 2), (3, 1))
    bench.wait_issued((2, 0), (0, 2), (3, 1))
    assert bench.issued(3) == [2, 0, 3]
    assert all(bench.holds(slot, value) for slot, value in enumerate((3, 4, 1)))
    assert bench.uploader.has_arrived(0)


def test_an_expert_that_is_there_is_not_uploaded_again(bench: Bench) -> None:
    bench.target((0, 0), (1, 1))
    bench.wait_issued((0, 0), (1, 1))
    bench.target((1, 1), (0, 0), (2, 2))
    bench.wait_issued((2, 2))
    assert bench.issued(3) == [0, 1, 2]


def test_new_targets_drop_uploads_that_had_not_started(slow: Bench) -> None:
    slow.target((0, 0), (1, 1), (2, 2))
    assert slow.issued(2) == [0, 0]
    slow.target((3, 1))
    slow.drain()
    slow.wait_issued((3, 1))
    assert slow.issued(4) == [0, 0, 3, 3]
    assert slow.is_issued(0, 0), "an upload that had started is of use"
    assert not slow.is_issued(1, 1)
    assert not slow.is_issued(2, 2)


def test_an_upload_that_lost_its_slot_is_never_computed_with(slow: Bench) -> None:
    slow.target((0, 1), (1, 0))
    slow.issued(2)
    slow.arrive()
    assert slow.issued(3) == [0, 0, 1], "half of expert 1"
    slow.target((2, 0))
    assert not slow.is_issued(1, 0)
    slow.drain()
    slow.wait_issued((2, 0))
    assert not slow.is_issued(1, 0)
    assert slow.holds(0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_upload_that_loses_its_slot_while_it_is_issued_is_not_used(kind: str) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        begun.set()
        assert go.wait(60)

    bench = Bench(kind, experts=2, slots=1, inject=wait)
    second = bench.entry(1)
    bench.store.begin_update(second)  # its upload cannot start yet
    bench.target((0, 0))
    assert begun.wait(60)
    bench.target((1, 0))
    go.set()
    bench.uploader.wait_idle()
    assert not bench.is_issued(0, 0)
    rewrite(bench.store, [second])
    bench.wait_issued((1, 0))
    assert bench.holds(0, value_of(second))
    bench.close()


def test_a_slot_that_is_being_overwritten_holds_no_expert(slow: Bench) -> None:
    slow.target((0, 0))
    slow.wait_issued((0, 0))
    slow.target((1, 0))
    slow.arrive()
    assert slow.issued(3)[2:] == [1]
    assert not slow.is_issued(0, 0), "half of it is overwritten"
    slow.drain()
    slow.wait_issued((1, 0))


def test_wait_issued_returns_with_the_first_or_with_every_upload(slow: Bench) -> None:
    slow.target((0, 0), (1, 1))
    pairs = [(slow.entry(expert), expert) for expert in range(2)]
    slow.uploader.wait_issued(pairs, every=False)
    assert slow.is_issued(0, 0)
    waiting = threading.Thread(target=slow.uploader.wait_issued, args=(pairs, True), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    slow.drain()
    waiting.join(60)
    assert not waiting.is_alive()


# -- updates ------------------------------------------------------------------------------------


def test_an_expert_waits_for_its_own_update_and_delays_no_other(bench: Bench) -> None:
    entry = bench.entry(0)
    bench.store.begin_update(entry)
    bench.target((0, 0), (1, 1))
    bench.wait_issued((1, 1))
    bench.uploader.wait_idle()
    assert bench.issued(1) == [1]
    assert not bench.is_issued(0, 0)
    rewrite(bench.store, [entry])
    bench.wait_issued((0, 0))
    assert bench.holds(0, value_of(entry))


def test_weights_that_changed_are_uploaded_again_without_being_asked_for(bench: Bench) -> None:
    bench.target((0, 0), (1, 1))
    bench.wait_issued((0, 0), (1, 1))
    bench.store.write_part(bench.entry(1), Part.WEIGHTS, lambda memory: memory.fill_(50))
    bench.wait_issued((1, 1))
    assert bench.holds(1, 50)


def test_an_upload_of_old_weights_begins_again(slow: Bench) -> None:
    slow.target((0, 0), (1, 1))
    slow.issued(2)
    slow.arrive()
    assert slow.issued(3) == [0, 0, 1]
    entry = slow.entry(1)
    slow.store.begin_update(entry)  # after half of it
    slow.drain()
    assert not slow.is_issued(1, 1)
    rewrite(slow.store, [entry])
    slow.drain()
    slow.wait_issued((1, 1))
    assert slow.holds(1, value_of(entry))


def test_waiting_for_weights_that_change_meanwhile_returns_with_the_new_ones(slow: Bench) -> None:
    slow.target(*((e, e) for e in range(4)))
    waiting = threading.Thread(target=slow.wait_issued, args=((3, 3),), daemon=True)
    waiting.start()
    slow.issued(2)
    slow.store.write_part(slow.entry(3), Part.WEIGHTS, lambda memory: memory.fill_(50))
    slow.drain()
    waiting.join(60)
    assert not waiting.is_alive()
    assert slow.is_issued(3, 3)
    assert slow.holds(3, 50)


# -- what is expected and what is urgent --------------------------------------------------------


def test_expected_records_are_issued_with_one_record_in_flight(slow: Bench) -> None:
    slow.target((0, 0), (1, 1), (2, 2))
    assert slow.issued(2) == [0, 0]
    assert not slow.uploader.has_arrived(0)
    slow.arrive()
    assert slow.issued(3) == [0, 0, 1]


def test_an_urgent_upload_waits_for_one_record_and_the_other_continues_after_it(
    slow: Bench,
) -> None:
    slow.target((0, 0), (1, 1), (2, 2))
    slow.issued(2)
    slow.arrive()
    assert slow.issued(3)[2:] == [1], "half of it"
    slow.target((5, 5), (1, 1), (2, 2))
    for _ in range(2):  # the two pieces in front of it
        slow.arrive()
    assert slow.issued(5)[3:] == [5, 5]
    for _ in range(2):
        slow.arrive()
    assert slow.issued(7)[5:] == [1, 2], "the missing half, then the next expert"
    slow.drain()
    slow.wait_issued((5, 5), (1, 1), (2, 2))
    assert all(slow.holds(expert, expert + 1) for expert in (5, 1, 2))


def test_certain_records_are_issued_whole_and_further_ahead(slow: Bench) -> None:
    slow.target(*((e, e) for e in range(6)), certain=True)
    assert slow.issued(4) == [0, 1, 2, 3], "until the limit is exceeded"
    slow.arrive()
    assert slow.issued(5) == [0, 1, 2, 3, 4]


def test_without_overlap_one_copy_is_in_flight(slow: Bench) -> None:
    slow.uploader.set_overlap(False)
    slow.target((0, 0), (1, 1), certain=True)
    assert slow.issued(1) == [0]
    slow.arrive()
    assert slow.issued(2) == [0, 1]


# -- slots --------------------------------------------------------------------------------------


def test_a_slot_is_used_from_a_computation_until_the_next_upload(bench: Bench) -> None:
    bench.target((0, 0))
    bench.wait_issued((0, 0))
    with bench.store.sync.lock:
        assert not bench.uploader.was_used(0)
        bench.uploader.release([0], record_event(CPU))
        assert bench.uploader.was_used(0)
    bench.target((1, 0))
    bench.wait_issued((1, 0))
    assert not bench.uploader.was_used(0)


def test_an_upload_waits_for_the_last_reader_of_its_slot() -> None:
    bench, reader = Bench("thread", experts=2, slots=2), GatedEvent()
    with bench.store.sync.lock:
        bench.uploader.release([1], reader)
    bench.target((0, 0), (1, 1))
    bench.wait_issued((0, 0), (1, 1))
    assert reader not in bench.stream.after[0]
    assert bench.stream.after[1] == [reader]
    bench.close()


def test_a_host_slot_is_not_reused_until_the_copy_out_of_it_has_ended(tmp_path: Path) -> None:
    """Also if only half of the record was copied, and the expert is not wanted any more."""
    store = disk_store(2, permanent=0, cache=1, folder=tmp_path)
    first, second = store.places.entries
    transfers = threading.Semaphore(0)
    assert store.places.assign_host_slot(first, ())
    store.disk.begin_io(first, Part.WEIGHTS, write=False)
    store.disk.end_io(first, Part.WEIGHTS, write=False)
    store.disk.on_change(transfers.release)
    bench = Bench("thread", 2, 2, HALVES, at_once=False, store=store)
    bench.target((0, 0))
    wait_until(lambda: bench.stream.in_flight)
    bench.target()
    assert not store.places.assign_host_slot(second, ())
    assert not transfers.acquire(blocking=False)
    bench.stream.arrive()
    assert transfers.acquire(timeout=60), "the stager is told that the slot may be reused"
    assert store.places.assign_host_slot(second, ())
    bench.uploader.close()
    store.close()


# -- failures, delays, traces -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_upload_is_raised_where_it_is_awaited(kind: str) -> None:
    def fail(what: str) -> None:
        raise OSError(f"no link for {what}")

    bench = Bench(kind, 1, 1, inject=fail)
    bench.target((0, 0))
    with pytest.raises(EngineError, match="no link for upload") as caught:
        bench.wait_issued((0, 0))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(EngineError, match="no link for upload"):
        bench.uploader.wait_idle()
    bench.uploader.close()
    bench.store.close()


@needs_compiler
def test_an_error_of_the_driver_is_raised_where_the_upload_is_awaited() -> None:
    bench = Bench("native", 1, 1)
    bench.calls.code = 700
    bench.target((0, 0))
    with pytest.raises(EngineError, match="700"):
        bench.wait_issued((0, 0))
    bench.uploader.close()
    bench.store.close()


class CountedStream(CopyStream):
    """Counts the end events of its copies that are still referenced."""

    def __init__(self) -> None:
        super().__init__("upload", CPU, Recorder(), None)
        self.alive: weakref.WeakSet[StreamEvent] = weakref.WeakSet()

    def copy(self, *args: Any, **options: Any) -> StreamEvent:
        super().copy(*args, **options)
        event = _End()
        self.alive.add(event)
        return event


class _End(StreamEvent):
    """An end event that can be referenced weakly."""


def test_events_of_copies_that_have_ended_are_forgotten() -> None:
    """Their number grew with every upload, and with it the time of each."""
    store, stream = host_store(8), CountedStream()
    uploader = ThreadUploader(store, device_slab(2, LAYOUT.weight_bytes, CPU), stream, 2)
    for number in range(200):
        entry = store.places.entries[number % 8]
        with store.sync.lock:
            uploader.set_targets([Target(entry, number % 2, certain=True)])
        uploader.wait_issued([(entry, number % 2)], every=True)
    uploader.wait_idle()
    assert len(stream.alive) < 20
    uploader.close()
    store.close()


class Arrivals:
    """A thread in which copies arrive after random delays."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        delays = random.Random(3)
        while not self._stop.is_set():
            if self._bench.in_flight:
                self._bench.arrive()
            time.sleep(delays.random() * 5e-4)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("late", ["nothing", "issue", "arrival"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_issued_slot_gets_the_current_weights_under_updates_and_delays(
    kind: str, late: str, overlap: bool
) -> None:
    numbers, delays = random.Random(1), random.Random(2)
    inject = (lambda _: time.sleep(delays.random() * 1e-3)) if late == "issue" else None
    bench = Bench(kind, 6, 4, HALVES, at_once=late != "arrival", inject=inject)
    arrivals = Arrivals(bench) if late == "arrival" else None
    bench.uploader.set_overlap(overlap)
    for _ in range(40):
        pairs = list(zip(numbers.sample(range(6), 4), numbers.sample(range(4), 4), strict=True))
        updated = [bench.entry(expert) for expert in numbers.sample(range(6), 2)]
        for entry in updated:
            bench.store.begin_update(entry)
        bench.target(*pairs, certain=numbers.random() < 0.5)
        updates = threading.Thread(target=rewrite, args=(bench.store, updated))
        updates.start()
        for expert, slot in pairs[: numbers.randrange(1, 4)]:
            bench.wait_issued((expert, slot))
            assert bench.holds(slot, value_of(bench.entry(expert)))
        updates.join()
    if arrivals is not None:
        arrivals.stop()
    bench.close()


def test_every_upload_is_counted_and_traced(bench: Bench) -> None:
    recorder = bench.stream.recorder
    bench.target((0, 0))
    bench.wait_issued((0, 0))
    recorder.start()
    bench.target((2, 2), (1, 1))
    bench.wait_issued((2, 2), (1, 1))
    wait_until(lambda: len(recorder.spans()) == 2)
    assert [span.name for span in recorder.spans()] == ["expert 0.2 by test", "expert 0.1 by test"]
    assert recorder.counters() == {"upload": 3 * RECORD}
