"""Experts that are read from disk when they are needed, and stay in host memory until then."""

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from overspill.core.errors import DiskError
from overspill.core.expert_map import ExpertMap
from overspill.tiers.entry import Part
from overspill.tiers.layout import ALIGN
from overspill.tiers.ssd import PRESENT
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer import disk_reads
from overspill.transfer.disk_reads import DiskReads
from overspill.transfer.streams import Inject
from tests.tiers.mixed import mixed_layout
from tests.transfer.fakes import disk_store

EXPERTS, CACHE = 6, 3


class GivenScores:
    def __init__(self, scores: Sequence[float]) -> None:
        self.scores_LE = np.array([scores])
        self.used: list[list[int]] = []

    def use(self, experts_LN: np.ndarray) -> None:
        self.used.append(experts_LN[0].tolist())


class Reader:
    """Reads what must be read, as a native thread does."""

    def __init__(
        self, folder: Path, scores: Sequence[float] = (0.0,) * EXPERTS, inject: Inject | None = None
    ) -> None:
        self.store: ExpertStore = disk_store(EXPERTS, 0, CACHE, folder)
        for number, entry in enumerate(self.store.places.entries):
            self.store.set_part(entry, Part.WEIGHTS, lambda memory, n=number: memory.fill_(n + 1))
        self.policy = GivenScores(scores)
        self.recorder = Recorder()
        self.ahead: list[int] = []  # experts that are being read
        self.reads = DiskReads(self.store, [self.policy], self.recorder, inject)

    def read(self, *experts: int, error: int = 0) -> int:
        """Returns how many were read from the file. They are held."""
        count = 0
        for place, (address, offset) in enumerate(self.reads.hold(0, experts)):
            if offset < 0:
                continue
            self.reads.learn()
            if error:
                self.reads.end_reads(place, error)
            memory = self.store.host(self.store.places.entries[experts[place]], Part.WEIGHTS)
            assert memory.data_ptr() == address
            assert os.preadv(self.reads.file, [memory.numpy()], offset) == memory.nbytes
            count += 1
        self.reads.end_reads(-1, 0)
        return count

    def step(self, *experts: int) -> int:
        count = self.read(*experts)
        for expert in experts:
            memory = self.store.host(self.store.places.entries[expert], Part.WEIGHTS)
            assert (memory == expert + 1).all()
        self.reads.release()
        return count

    def expect(self, *experts: int) -> None:
        found = self.reads.expect(0, experts)
        size = self.store.memory.size(Part.WEIGHTS)
        for expert, (address, offset) in zip(experts, found, strict=True):
            if offset == PRESENT:
                continue
            entry = self.store.places.entries[expert]
            assert address == self.store.host(entry, Part.WEIGHTS).data_ptr()
            assert offset == entry.disk_slot * size
            self.ahead.append(expert)

    def end_ahead(self, error: int = 0) -> None:
        """What is read ahead has arrived."""
        while self.ahead:
            expert = self.ahead.pop()
            memory = self.store.host(self.store.places.entries[expert], Part.WEIGHTS)
            memory.fill_(99 if error else expert + 1)
            self.reads.end_ahead(0, expert, error)

    @contextmanager
    def when_it_waits(self, action: Callable[[], object]) -> Iterator[None]:
        """In another thread, when the body waits for the first time."""
        begun: list[threading.Thread] = []

        def sleep(seconds: float) -> None:
            if not begun:
                begun.append(threading.Thread(target=action))
                begun[0].start()
            time.sleep(seconds)

        with patch.object(disk_reads, "time", SimpleNamespace(**{**vars(time), "sleep": sleep})):
            yield
        assert begun, "it does not wait"
        begun[0].join()

    def in_host(self) -> set[int]:
        return {entry.number for entry in self.store.places.entries if entry.host_slot is not None}


def test_an_expert_is_read_once_while_it_is_in_host_memory(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    assert reader.step(1, 4) == 2
    assert reader.step(4, 2) == 1
    assert reader.step(1, 2, 4) == 0
    reader.reads.learn()
    assert reader.policy.used == [[1, 4], [4, 2], [1, 2, 4]]
    size = reader.store.memory.size(Part.WEIGHTS)
    assert reader.recorder.counters()["ssd read"] == 3 * size
    reader.store.places.check_conserved()


def test_records_have_the_size_of_their_layer(tmp_path: Path) -> None:
    pages, cache = [2, 1, 3], 3
    whole = ExpertMap.whole(2)
    store = ExpertStore(3, whole, mixed_layout(pages), 0, cache, False, tmp_path)
    for entry in store.places.entries:
        store.set_part(entry, Part.WEIGHTS, lambda memory, e=entry: memory.fill_(e.number + 1))
    recorder = Recorder()
    reads = DiskReads(store, [GivenScores((0.0, 0.0))] * 3, recorder, None)
    read = 0
    for layer in (0, 1, 2, 1, 0, 2):
        for expert, (address, offset) in enumerate(reads.hold(layer, [0, 1])):
            memory = store.host(store.places.at(layer, expert), Part.WEIGHTS)
            assert memory.data_ptr() == address
            assert memory.nbytes == pages[layer] * ALIGN
            if offset != PRESENT:
                assert os.preadv(reads.file, [memory.numpy()], offset) == memory.nbytes
                read += memory.nbytes
            assert (memory == store.places.at(layer, expert).number + 1).all()
        reads.end_reads(-1, 0)
        reads.release()
        reads.learn()
    assert recorder.counters()["ssd read"] == read
    store.places.check_conserved()
    store.close()


def test_the_expert_with_the_lowest_score_leaves(tmp_path: Path) -> None:
    reader = Reader(tmp_path, [5, 4, 3, 2, 1, 0])
    for expert in (4, 0, 2):
        reader.step(expert)
    reader.step(5)
    assert reader.in_host() == {0, 2, 5}, "not the one that was used first"
    reader.step(5, 1, 3)
    assert reader.in_host() == {5, 1, 3}, "those that are needed stay"


@pytest.mark.parametrize("seed", range(4))
def test_any_experts_have_their_weights(seed: int, tmp_path: Path) -> None:
    random.seed(seed)
    reader = Reader(tmp_path, [random.random() for _ in range(EXPERTS)])
    for _ in range(40):
        reader.step(*random.sample(range(EXPERTS), random.randint(1, CACHE)))
        assert len(reader.in_host()) <= CACHE
    reader.store.places.check_conserved()


@pytest.mark.parametrize(("error", "message"), [(errno.EIO, "Input/output"), (-1, "truncated")])
def test_a_read_that_fails_names_the_expert_and_holds_nothing(
    error: int, message: str, tmp_path: Path
) -> None:
    reader = Reader(tmp_path)
    reader.step(0)
    with pytest.raises(DiskError, match=rf"expert 0\.3 could not be read .*{message}"):
        reader.read(0, 3, error=error)
    reader.store.places.check_conserved()
    assert reader.step(0, 3) == 1


def test_an_injected_failure_is_a_disk_error(tmp_path: Path) -> None:
    failing = [True]

    def inject(kind: str) -> None:
        if failing[0]:
            raise OSError(errno.EIO, f"injected: {kind}")

    reader = Reader(tmp_path, inject=inject)
    with pytest.raises(DiskError, match="injected: ssd read"):
        reader.read(2)
    failing[0] = False
    assert reader.step(2) == 1
    reader.store.places.check_conserved()


def test_a_transfer_that_runs_is_awaited(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.step(0)
    entry = reader.store.places.entries[0]
    reader.store.disk.begin_io(entry, Part.WEIGHTS, write=False)
    with reader.when_it_waits(lambda: reader.store.disk.end_io(entry, Part.WEIGHTS, False)):
        assert reader.step(0) == 0


def test_slots_that_are_in_use_are_awaited(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.step(0, 1, 2)
    for entry in reader.store.places.entries[:3]:
        reader.store.hold(entry)
    with reader.when_it_waits(lambda: reader.store.release(reader.store.places.entries[1])):
        assert reader.step(5) == 1
    assert reader.in_host() == {0, 2, 5}
    for number in (0, 2):
        reader.store.release(reader.store.places.entries[number])


def test_expected_experts_are_read_ahead_and_not_again(tmp_path: Path) -> None:
    reader = Reader(tmp_path, [1, 1, 1, 1, 0, 0])
    reader.step(0, 1)
    reader.expect(1, 4, 5)
    assert reader.ahead == [4, 5], "1 is there already"
    assert reader.in_host() == {1, 4, 5}, "1 is expected too"
    reader.end_ahead()
    assert reader.step(4, 2) == 1
    assert reader.in_host() == {1, 2, 4}, "5 is not expected any more and has the lowest score"
    reader.store.places.check_conserved()


@pytest.mark.parametrize("error", [0, errno.EIO, -1])
def test_a_step_waits_for_what_is_read_ahead(error: int, tmp_path: Path) -> None:
    """What could not be read ahead is read again."""
    reader = Reader(tmp_path)
    reader.expect(3)
    with reader.when_it_waits(lambda: reader.end_ahead(error)):
        assert reader.step(3, 1) == 1, "the other one is read meanwhile"
    assert not reader.ahead
    reader.store.places.check_conserved()


def test_a_failure_of_what_was_read_ahead_names_the_expert(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.expect(3)
    os.ftruncate(reader.reads.file, 0)
    with (
        reader.when_it_waits(lambda: reader.end_ahead(errno.EIO)),
        pytest.raises(DiskError, match=r"expert 0\.3 could not be read"),
    ):
        reader.step(3)
    reader.store.places.check_conserved()


def test_no_slot_is_free_for_experts_that_are_expected(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.read(0, 1, 2)
    reader.expect(4)
    assert not reader.ahead
    reader.reads.release()
    assert reader.step(4) == 1
    reader.store.places.check_conserved()
