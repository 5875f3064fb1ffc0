"""The stager: what is read back is what was written last, whatever the order and the delays."""

import random
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overspill.core.errors import EngineError
from overspill.tiers.store import Entry, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.lanes import Inject
from overspill.transfer.stager import Stager
from tests.transfer.fakes import GatedMark, disk_store, wait_until

BOTH = Part.WEIGHTS | Part.STATES


class Bench:
    """A stager whose needs are a list that the test sets."""

    def __init__(self, experts: int, home: int, cache: int, folder: Path, late: Inject | None):
        self.store = disk_store(experts, home, cache, folder)
        self.store.take(Part.STATES)
        self.needs: list[tuple[Entry, Part]] = []
        self.stager = Stager(self.store, lambda: self.needs, 3, Recorder(), late)

    def want(self, *experts: int, parts: Part = BOTH) -> None:
        with self.store.lock:
            self.needs = [(self.store.entries[expert], parts) for expert in experts]
        self.stager.pump()

    def bring(self, expert: int, parts: Part = BOTH) -> Entry:
        entry = self.store.entries[expert]
        wait_until(self.store, lambda: entry.row is not None and not parts & ~entry.have, entry)
        return entry

    def update(self, entry: Entry, value: int) -> None:
        """As the optimizer does it: the row is held, changed, and then newer than the disk."""
        with self.store.lock:
            entry.queued += 1
        for part in (Part.WEIGHTS, Part.STATES):
            self.store.host(entry, part).fill_((value + part) % 256)
        with self.store.lock:
            entry.queued -= 1
            if entry.disk_row is not None:
                entry.dirty |= BOTH
            self.stager.pump()

    def rest(self) -> None:
        wait_until(self.store, self.stager.idle)

    def close(self) -> None:
        self.stager.close()
        self.store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(experts=5, home=0, cache=2, folder=tmp_path, late=None)


@st.composite
def courses(draw: st.DrawFn) -> tuple[tuple[int, int, int], list[tuple[list[int], bool]], int]:
    """(experts, home rows, cache rows), then what is needed in which order and whether the first of
    it is updated, and a seed for the delays."""
    experts = draw(st.integers(2, 7))
    home = draw(st.integers(0, experts - 1))
    cache = draw(st.integers(1, experts))
    needs = st.lists(st.integers(0, experts - 1), min_size=1, max_size=6)
    return (
        (experts, home, cache),
        draw(st.lists(st.tuples(needs, st.booleans()), max_size=14)),
        draw(st.integers(0, 1000)),
    )


@settings(max_examples=40)
@given(courses())
def test_data_read_back_is_the_data_written_last(
    course: tuple[tuple[int, int, int], list[tuple[list[int], bool]], int],
) -> None:
    sizes, steps, seed = course
    late = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(*sizes, Path(folder), lambda _: time.sleep(late.random() * 2e-3))
        store = bench.store
        expected = {}
        for entry in store.entries:
            expected[entry] = entry.number * 8
            for part in (Part.WEIGHTS, Part.STATES):
                store.write_part(entry, part, lambda row, v=entry.number * 8 + part: row.fill_(v))
        for number, (needs, updated) in enumerate(steps):
            bench.want(*needs)
            entry = bench.bring(needs[0])
            for part in (Part.WEIGHTS, Part.STATES):
                _check(store.host(entry, part), expected[entry] + part)
            if updated:
                expected[entry] = 64 + 8 * number
                bench.update(entry, expected[entry])
        bench.want()
        bench.rest()
        store.check_conserved()
        for entry, value in expected.items():
            for part in (Part.WEIGHTS, Part.STATES):
                _check(store.read_part(entry, part), value + part)
            if entry.disk_row is not None:
                assert not entry.dirty, "nobody needs it, and the disk has not got it"
        bench.close()


def _check(row: Tensor, value: int) -> None:
    assert torch.equal(row, torch.full_like(row, value % 256))


def test_an_update_during_the_write_back_of_the_last_one_is_not_lost(bench: Bench) -> None:
    bench.want(0)
    entry = bench.bring(0)
    bench.update(entry, 10)
    file = bench.store.files[Part.WEIGHTS]
    write, written, go = file.write, threading.Event(), threading.Event()

    def slow(row: int, source: Tensor) -> None:
        write(row, source)
        written.set()
        assert go.wait(10)

    file.write = slow  # type: ignore[method-assign]
    bench.want(1)  # 0 is not needed any more: it is written back
    assert written.wait(10)
    bench.update(entry, 20)
    go.set()
    bench.want(1, 2)
    bench.bring(1)
    bench.bring(2)  # both rows were given away
    bench.want(0)
    _check(bench.store.host(bench.bring(0), Part.WEIGHTS), 20 + Part.WEIGHTS)
    bench.close()


def test_the_rows_hold_what_is_needed_next_and_no_more_is_read(bench: Bench) -> None:
    bench.want(3, 1, 4)
    bench.bring(3)
    bench.bring(1)
    bench.rest()
    assert bench.store.entries[4].row is None
    assert not bench.store.free_rows
    bench.store.check_conserved()
    bench.close()


def test_only_the_parts_that_are_needed_are_read(bench: Bench) -> None:
    bench.want(3, parts=Part.WEIGHTS)
    assert bench.bring(3, Part.WEIGHTS).have == Part.WEIGHTS
    bench.rest()
    bench.want(3)
    assert bench.bring(3).have == BOTH
    bench.close()


def test_what_lives_in_host_memory_is_left_alone(tmp_path: Path) -> None:
    bench = Bench(experts=3, home=2, cache=1, folder=tmp_path, late=None)
    at_home = [entry.number for entry in bench.store.entries if entry.disk_row is None]
    bench.want(*at_home)
    bench.rest()
    assert len(bench.store.free_rows) == 1
    bench.close()


def test_the_least_recently_needed_goes_first(bench: Bench) -> None:
    bench.want(0, 1)
    bench.bring(0)
    bench.bring(1)
    bench.want(1)  # 1 was needed after 0
    bench.want(2)
    bench.bring(2)
    assert bench.store.entries[0].row is None
    assert bench.store.entries[1].row is not None
    bench.close()


def test_a_row_stays_while_it_is_uploaded_updated_or_moved(bench: Bench) -> None:
    bench.want(0, 1)
    uploaded, updated = bench.bring(0), bench.bring(1)
    upload = GatedMark()
    with bench.store.lock:
        uploaded.upload = upload
        updated.queued = 1
    bench.want(2, 3)
    bench.rest()
    assert [bench.store.entries[expert].row is None for expert in (0, 1, 2, 3)] == [
        False,
        False,
        True,
        True,
    ]
    upload.open()
    bench.stager.pump()
    bench.bring(2)
    assert uploaded.row is None
    with bench.store.lock:
        updated.queued = 0
        bench.stager.pump()
    bench.bring(3)
    bench.close()


def test_a_sooner_expert_is_not_overtaken_by_a_later_one(bench: Bench) -> None:
    bench.want(0, 1)
    held = bench.bring(0)
    bench.bring(1)
    with bench.store.lock:
        held.queued = 1
    bench.want(2, 3, 4)
    bench.bring(2)
    bench.rest()
    # one row is held: of those that wait for it, none may have taken another's place
    assert bench.store.entries[3].row is None
    assert bench.store.entries[4].row is None
    with bench.store.lock:
        held.queued = 0
        bench.stager.pump()
    bench.bring(3)
    bench.close()


@pytest.mark.parametrize("kind", ["ssd read", "ssd write"])
def test_who_waits_hears_that_the_disk_failed(kind: str, tmp_path: Path) -> None:
    def fail(what: str) -> None:
        if what == kind:
            raise OSError("no disk")

    bench = Bench(3, 0, 1, tmp_path, fail)
    with pytest.raises(EngineError, match="no disk"):
        _write_back(bench)
    bench.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("overspill-ssd")]


def _write_back(bench: Bench) -> None:
    bench.want(0)
    bench.update(bench.bring(0), 1)
    bench.want(1)
    bench.bring(1)


def test_closing_with_jobs_under_way_ends_the_threads(tmp_path: Path) -> None:
    bench = Bench(5, 0, 2, tmp_path, lambda _: time.sleep(0.02))
    bench.want(0, 1)
    bench.update(bench.bring(0), 1)
    bench.want(2, 3, 4)
    bench.close()
    assert bench.store.error is None
    assert not [t for t in threading.enumerate() if t.name.startswith("overspill-ssd")]
