"""The loader: the right weights in the right slot, most urgent first, never over one in use."""

import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from overspill.core.errors import EngineError
from overspill.tiers.slab import device_slab
from overspill.tiers.store import Part
from overspill.trace.recorder import Recorder
from overspill.transfer.lanes import Lane, Mark
from overspill.transfer.loader import Loader, Target
from tests.transfer.fakes import (
    CPU,
    LAYOUT,
    GatedLane,
    GatedMark,
    host_store,
    rewrite,
    value_of,
    wait_until,
)


class Bench:
    """A loader with `slots` slots over a store of `experts` experts."""

    def __init__(self, experts: int, slots: int, lane: Lane | None = None) -> None:
        self.store = host_store(experts)
        self.lane = lane or GatedLane()
        self.slab = device_slab(slots, LAYOUT.weight_bytes, CPU)
        self.loader = Loader(self.store, self.slab, self.lane, slots)

    def target(self, *pairs: tuple[int, int]) -> None:
        with self.store.lock:
            self.loader.set_targets([Target(self.store.entries[e], slot) for e, slot in pairs])

    def fresh(self, expert: int, slot: int) -> bool:
        with self.store.lock:
            return self.loader.fresh(self.store.entries[expert], slot)

    def await_fresh(self, *pairs: tuple[int, int]) -> None:
        for expert, slot in pairs:
            entry = self.store.entries[expert]
            wait_until(self.store, lambda e=entry, s=slot: self.loader.fresh(e, s), entry)

    def await_idle(self) -> None:
        wait_until(self.store, self.loader.idle)

    def values(self) -> list[int]:
        return [int(row[0]) for row in self.slab]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(experts=4, slots=3)
    yield bench
    assert isinstance(bench.lane, GatedLane)
    bench.lane.gate.set()
    bench.loader.close()
    bench.store.close()
    assert not [t for t in threading.enumerate() if t.name == "overspill-loader"]


def lane_of(bench: Bench) -> GatedLane:
    assert isinstance(bench.lane, GatedLane)
    return bench.lane


def test_uploads_follow_the_order_of_need(bench: Bench) -> None:
    bench.target((2, 0), (0, 2), (3, 1))
    bench.await_fresh((2, 0), (0, 2), (3, 1))
    assert lane_of(bench).names == ["expert 0.2", "expert 0.0", "expert 0.3"]
    assert bench.values() == [3, 4, 1]


def test_what_is_there_is_not_uploaded_again(bench: Bench) -> None:
    bench.target((0, 0), (1, 1))
    bench.await_fresh((0, 0), (1, 1))
    bench.target((1, 1), (0, 0), (2, 2))
    bench.await_fresh((2, 2))
    assert lane_of(bench).names == ["expert 0.0", "expert 0.1", "expert 0.2"]


def test_new_targets_drop_what_had_not_started(bench: Bench) -> None:
    lane = lane_of(bench)
    lane.gate.clear()
    bench.target((0, 0), (1, 1), (2, 2))
    assert lane.begun.acquire(timeout=10)
    bench.target((3, 1))
    lane.gate.set()
    bench.await_fresh((3, 1))
    bench.await_idle()
    assert lane.names == ["expert 0.0", "expert 0.3"]
    assert bench.fresh(0, 0), "what had started is of use"
    assert not bench.fresh(2, 2)


def test_an_upload_that_lost_its_slot_is_never_computed_with(bench: Bench) -> None:
    lane = lane_of(bench)
    lane.gate.clear()
    bench.target((0, 0))
    assert lane.begun.acquire(timeout=10)
    bench.target((1, 0))
    assert not bench.fresh(0, 0)
    assert not bench.fresh(1, 0)
    lane.gate.set()
    bench.await_fresh((1, 0))
    assert not bench.fresh(0, 0)
    assert bench.values()[0] == 2


def test_a_slot_that_is_being_filled_is_nobodys(bench: Bench) -> None:
    bench.target((0, 0))
    bench.await_fresh((0, 0))
    lane = lane_of(bench)
    lane.gate.clear()
    bench.target((1, 0))
    for _ in range(2):
        assert lane.begun.acquire(timeout=10)
    assert not bench.fresh(0, 0), "its bytes are being overwritten"
    lane.gate.set()
    bench.await_fresh((1, 0))


def test_an_upload_waits_for_the_slots_last_reader(bench: Bench) -> None:
    reader = GatedMark()
    with bench.store.lock:
        bench.loader.slots[1].free = reader
    bench.target((0, 0), (1, 1))
    bench.await_fresh((0, 0), (1, 1))
    assert lane_of(bench).after[1] == [reader]
    assert reader not in lane_of(bench).after[0]


def test_an_expert_waits_for_its_own_update_and_holds_up_nobody(bench: Bench) -> None:
    entry = bench.store.entries[0]
    with bench.store.lock:
        entry.stale, entry.version = True, 1
    bench.target((0, 0), (1, 1))
    bench.await_fresh((1, 1))
    bench.await_idle()
    assert lane_of(bench).names == ["expert 0.1"]
    bench.store.host(entry, Part.WEIGHTS).fill_(99)
    with bench.store.lock:
        entry.stale = False
        bench.store.wake_loader.notify()
    bench.await_fresh((0, 0))
    assert bench.values()[0] == 99


def test_weights_that_changed_are_uploaded_again(bench: Bench) -> None:
    bench.target((0, 0))
    bench.await_fresh((0, 0))
    bench.store.write_part(bench.store.entries[0], Part.WEIGHTS, lambda row: row.fill_(50))
    assert not bench.fresh(0, 0)
    bench.target((0, 0))
    bench.await_fresh((0, 0))
    assert bench.values()[0] == 50


def test_weights_that_change_under_a_copy_are_uploaded_again(bench: Bench) -> None:
    lane, entry = lane_of(bench), bench.store.entries[0]
    lane.gate.clear()
    bench.target((0, 0))
    assert lane.begun.acquire(timeout=10)
    with bench.store.lock:
        entry.stale, entry.version = True, entry.version + 1
    lane.gate.set()
    bench.await_idle()
    assert not bench.fresh(0, 0)
    bench.store.host(entry, Part.WEIGHTS).fill_(60)
    with bench.store.lock:
        entry.stale = False
        bench.store.wake_loader.notify()
    bench.await_fresh((0, 0))
    assert bench.values()[0] == 60


def test_a_row_is_guarded_while_it_is_read(bench: Bench) -> None:
    lane, entry = lane_of(bench), bench.store.entries[0]
    lane.gate.clear()
    bench.target((0, 0))
    assert lane.begun.acquire(timeout=10)
    with bench.store.lock:
        assert entry.upload is not None
        assert not entry.upload.done()
        assert not bench.loader.idle()
    lane.gate.set()
    bench.await_fresh((0, 0))
    with bench.store.lock:
        assert entry.upload.done()


def test_who_waits_for_an_upload_hears_that_the_loader_failed() -> None:
    def fail(kind: str) -> None:
        raise OSError("no link")

    bench = Bench(1, 1, Lane("upload", CPU, Recorder(), fail))
    bench.target((0, 0))
    with pytest.raises(EngineError, match="no link"):
        bench.await_fresh((0, 0))
    bench.loader.close()
    bench.store.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_under_late_copies_and_updates_a_fresh_slot_holds_the_weights_of_now(
    seed: int, overlap: bool
) -> None:
    numbers, late = random.Random(seed), random.Random(seed + 100)
    lane = Lane("upload", CPU, Recorder(), lambda _: time.sleep(late.random() * 1e-3))
    bench = Bench(experts=6, slots=4, lane=lane)
    bench.loader.overlap = overlap
    for _ in range(60):
        order = numbers.sample(range(6), 4)
        pairs = list(zip(order, numbers.sample(range(4), 4), strict=True))
        updated = [bench.store.entries[expert] for expert in numbers.sample(range(6), 2)]
        # as the optimizer does it: outdated, rewritten, current again
        with bench.store.lock:
            for entry in updated:
                entry.stale, entry.version = True, entry.version + 1
        bench.target(*pairs)
        updates = threading.Thread(target=rewrite, args=(bench.store, updated))
        updates.start()
        for expert, slot in pairs[: numbers.randrange(1, 4)]:
            bench.await_fresh((expert, slot))
            entry = bench.store.entries[expert]
            expected = torch.full_like(bench.slab[slot], value_of(entry))
            assert torch.equal(bench.slab[slot], expected)
        updates.join()
    bench.loader.close()
    bench.store.close()


# -- guesses and what is urgent ---------------------------------------------------------------


class SlowLink(GatedLane):
    """Copies are on their way until the test lets the oldest arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.on_their_way: deque[tuple[GatedMark, int]] = deque()

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], name: str, after: Iterable[Mark] = ()
    ) -> Mark:
        super().copy(pairs, name, after)
        mark = GatedMark()
        self.on_their_way.append((mark, sum(source.nbytes for _, source in pairs)))
        return mark

    def arrive(self) -> None:
        self.on_their_way.popleft()[0].open()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Records of two pieces, as those of real experts are."""
    monkeypatch.setattr("overspill.transfer.loader._PIECE", LAYOUT.weight_bytes // 2)
    monkeypatch.setattr("overspill.transfer.loader._SURE_BYTES", 3 * LAYOUT.weight_bytes)
    monkeypatch.setattr("overspill.transfer.loader.ALIGN", 64)
    bench = Bench(experts=6, slots=6, lane=SlowLink())
    yield bench
    link = slow_link(bench)
    bench.target()
    while link.on_their_way:
        link.arrive()
    bench.loader.close()
    bench.store.close()


def slow_link(bench: Bench) -> SlowLink:
    assert isinstance(bench.lane, SlowLink)
    return bench.lane


def settled(bench: Bench) -> list[str]:
    """What was issued when nothing more is, for now."""
    link, seen = slow_link(bench), -1
    while seen != len(link.names):
        seen = len(link.names)
        time.sleep(0.02)
    return list(link.names)


def test_guesses_are_issued_two_halves_at_a_time(slow: Bench) -> None:
    slow.target((0, 0), (1, 1), (2, 2))
    assert settled(slow) == ["expert 0.0", "expert 0.0"], "one record's worth"
    slow_link(slow).arrive()
    assert settled(slow) == ["expert 0.0", "expert 0.0", "expert 0.1"]


def test_an_urgent_upload_waits_for_one_copy_and_the_other_goes_on_after_it(slow: Bench) -> None:
    slow.target((0, 0), (1, 1), (2, 2))
    settled(slow)
    slow_link(slow).arrive()
    assert settled(slow)[2:] == ["expert 0.1"], "half of it"
    slow.target((5, 5), (1, 1), (2, 2))
    for _ in range(2):  # the two halves in front of it
        slow_link(slow).arrive()
    assert settled(slow)[3:] == ["expert 0.5", "expert 0.5"]
    for _ in range(2):
        slow_link(slow).arrive()
    names = settled(slow)
    assert names[5:] == ["expert 0.1", "expert 0.2"], "the half that was missing, then the next"
    while slow_link(slow).on_their_way:
        slow_link(slow).arrive()
        settled(slow)
    slow.await_fresh((5, 5), (1, 1), (2, 2))
    for expert, slot in ((5, 5), (1, 1), (2, 2)):
        assert (slow.slab[slot] == expert + 1).all()


def test_what_is_sure_is_queued_whole_and_further_ahead(slow: Bench) -> None:
    with slow.store.lock:
        entries = slow.store.entries
        slow.loader.set_targets([Target(entries[e], e, "real", sure=True) for e in range(6)])
    names = settled(slow)
    assert names == [f"expert 0.{e} real" for e in range(4)], "a little more than is allowed"
    slow_link(slow).arrive()
    assert len(settled(slow)) == 5


def test_half_a_record_of_old_weights_is_begun_again(slow: Bench) -> None:
    slow.target((0, 0), (1, 1))
    settled(slow)
    slow_link(slow).arrive()
    assert settled(slow)[2:] == ["expert 0.1"]
    entry = slow.store.entries[1]
    slow.store.write_part(entry, Part.WEIGHTS, lambda row: row.fill_(77))
    while slow_link(slow).on_their_way:
        slow_link(slow).arrive()
        settled(slow)
    slow.await_fresh((1, 1))
    assert (slow.slab[1] == 77).all()


def test_after_an_update_what_belongs_in_a_slot_is_uploaded_without_being_asked(
    bench: Bench,
) -> None:
    bench.target((0, 0), (1, 1))
    bench.await_fresh((0, 0), (1, 1))
    bench.store.write_part(bench.store.entries[1], Part.WEIGHTS, lambda row: row.fill_(50))
    bench.await_fresh((1, 1))
    assert bench.values()[1] == 50


def test_a_row_of_which_half_was_read_may_be_given_away_too(slow: Bench) -> None:
    """What it was read for may not be wanted any more: somebody has to hear of it."""
    heard = threading.Semaphore(0)
    slow.loader.row_read = heard.release
    slow.store.entries[0].disk_row = 0
    slow.target((0, 0))
    settled(slow)
    assert not heard.acquire(blocking=False)
    slow.target()
    slow_link(slow).arrive()
    assert heard.acquire(timeout=10)
