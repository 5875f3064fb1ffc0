"""The loader with a porter: the same promises as without."""

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from overspill.core.experts import ExpertShape
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import device_slab
from overspill.tiers.store import ExpertStore, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.lanes import PASSED, Lane, compute_mark, compute_waits
from overspill.transfer.loader import Target
from overspill.transfer.ported import PortedLoader, new_loader
from overspill.transfer.porter import porter_library
from tests.transfer.fakes import CPU, LAYOUT, host_store, rewrite, value_of
from tests.transfer.test_porter import FakeLink

pytestmark = pytest.mark.skipif(porter_library() is None, reason="no C++ compiler")


class Bench:
    def __init__(self, experts: int, slots: int, link: FakeLink) -> None:
        self.store = host_store(experts)
        self.slab = device_slab(slots, LAYOUT.weight_bytes, CPU)
        self.link = link
        self.recorder = Recorder()
        lane = Lane("upload", CPU, self.recorder, None)
        self.loader = PortedLoader(self.store, self.slab, lane, slots, link)  # type: ignore[arg-type]

    def target(self, *pairs: tuple[int, int], sure: bool = False) -> None:
        entries = self.store.entries
        with self.store.lock:
            self.loader.set_targets([Target(entries[e], s, "real", sure) for e, s in pairs])

    def fresh(self, expert: int, slot: int) -> bool:
        with self.store.lock:
            return self.loader.fresh(self.store.entries[expert], slot)

    def await_issued(self, *pairs: tuple[int, int]) -> None:
        entries = self.store.entries
        self.loader.await_issued([(entries[e], s) for e, s in pairs], every=True)

    def close(self) -> None:
        self.link.at_once = True
        self.loader.close()
        self.store.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(4, 3, FakeLink(at_once=True))
    yield bench
    bench.close()


def values(bench: Bench) -> list[int]:
    return [int(row[0]) for row in bench.slab]


def test_experts_arrive_in_their_slots(bench: Bench) -> None:
    bench.target((2, 0), (0, 2), (3, 1))
    bench.await_issued((2, 0), (0, 2), (3, 1))
    assert bench.fresh(2, 0)
    assert bench.loader.ends([0, 1, 2]) == []
    assert values(bench) == [3, 4, 1]


def test_what_was_dropped_before_it_was_issued_is_nobodys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overspill.transfer.loader._PIECE", LAYOUT.weight_bytes // 2)
    monkeypatch.setattr("overspill.transfer.loader.ALIGN", 64)
    bench = Bench(6, 6, FakeLink())
    bench.target(*((e, e) for e in range(6)))
    bench.await_issued((0, 0))
    bench.target((5, 5))
    assert bench.fresh(0, 0), "what was issued is of use"
    assert not bench.fresh(4, 4)
    assert bench.loader.slots[4].holds is None
    bench.close()


def test_weights_that_changed_are_uploaded_again_without_being_asked(bench: Bench) -> None:
    bench.target((0, 0), (1, 1))
    bench.await_issued((0, 0), (1, 1))
    bench.store.write_part(bench.store.entries[1], Part.WEIGHTS, lambda row: row.fill_(50))
    assert not bench.fresh(1, 1)
    bench.await_issued((1, 1))
    assert values(bench)[1] == 50


def test_an_expert_waits_for_its_own_update_and_holds_up_nobody(bench: Bench) -> None:
    entry = bench.store.entries[0]
    with bench.store.lock:
        entry.stale, entry.version = True, 1
    bench.target((0, 0), (1, 1))
    bench.await_issued((1, 1))
    bench.loader.settle()
    assert not bench.fresh(0, 0)
    bench.store.host(entry, Part.WEIGHTS).fill_(99)
    with bench.store.lock:
        entry.stale = False
        bench.store.wake_loader.notify()
    bench.await_issued((0, 0))
    assert values(bench)[0] == 99


def test_who_waits_for_weights_that_change_meanwhile_gets_the_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overspill.transfer.loader._PIECE", LAYOUT.weight_bytes // 2)
    monkeypatch.setattr("overspill.transfer.loader.ALIGN", 64)
    bench = Bench(4, 4, FakeLink())  # nothing arrives, so the last ones are not issued yet
    bench.target(*((e, e) for e in range(4)))
    done = threading.Event()
    waiting = threading.Thread(target=lambda: (bench.await_issued((3, 3)), done.set()), daemon=True)
    waiting.start()
    time.sleep(0.05)
    bench.store.write_part(bench.store.entries[3], Part.WEIGHTS, lambda row: row.fill_(50))
    deadline = time.monotonic() + 10
    while not done.is_set() and time.monotonic() < deadline:
        if bench.link.work:
            bench.link.arrive(1)
        time.sleep(1e-4)
    assert done.is_set()
    assert bench.fresh(3, 3)
    while bench.link.work:
        bench.link.arrive(1)
    assert (bench.slab[3] == 50).all()
    bench.close()


def test_the_recorder_hears_of_all(bench: Bench) -> None:
    bench.target((0, 0))
    bench.await_issued((0, 0))
    bench.recorder.start()
    bench.target((2, 2), (1, 1))
    bench.await_issued((2, 2), (1, 1))
    deadline = time.monotonic() + 10
    while len(spans := bench.recorder.spans()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [span.name for span in spans] == ["expert 0.2 real", "expert 0.1 real"]
    assert {span.row for span in spans} == {"upload"}
    assert bench.recorder.counters()["upload"] == 3 * LAYOUT.weight_bytes


def test_without_a_gpu_a_thread_of_ours_does_it() -> None:
    store = host_store(1)
    slab = device_slab(1, LAYOUT.weight_bytes, CPU)
    loader = new_loader(store, slab, Lane("upload", CPU, Recorder(), None), 1)
    assert not isinstance(loader, PortedLoader)
    loader.close()
    store.close()


class LateLink(FakeLink):
    """Work is done some time later, by a thread of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._numbers = random.Random(seed)
        self.closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.closed or self.work:
            if self.work:
                self.arrive(1)
            if self._numbers.random() < 0.3:
                time.sleep(self._numbers.random() * 1e-3)

    def finish(self) -> None:
        self.closed = True
        self._thread.join()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_under_late_copies_and_updates_a_fresh_slot_gets_the_weights_of_now(
    seed: int, overlap: bool
) -> None:
    numbers = random.Random(seed)
    link = LateLink(seed + 100)
    bench = Bench(6, 4, link)
    bench.loader.overlap = overlap
    for _ in range(60):
        order = numbers.sample(range(6), 4)
        pairs = list(zip(order, numbers.sample(range(4), 4), strict=True))
        updated = [bench.store.entries[expert] for expert in numbers.sample(range(6), 2)]
        with bench.store.lock:
            for entry in updated:
                entry.stale, entry.version = True, entry.version + 1
        bench.target(*pairs, sure=numbers.random() < 0.5)
        updates = threading.Thread(target=rewrite, args=(bench.store, updated))
        updates.start()
        for expert, slot in pairs[: numbers.randrange(1, 4)]:
            bench.await_issued((expert, slot))
            assert bench.fresh(expert, slot)
            for mark in bench.loader.ends([slot]):
                mark.wait()
            expected = torch.full_like(bench.slab[slot], value_of(bench.store.entries[expert]))
            assert torch.equal(bench.slab[slot], expected)
        updates.join()
    assert bench.loader.slots[0].free is PASSED
    bench.loader.close()
    link.finish()
    bench.store.close()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
def test_on_a_gpu_who_waits_for_the_arrival_reads_the_weights_of_now(seed: int) -> None:
    """A stream waits for the porter's number, under updates, withdrawn orders and slow readers."""
    device, numbers = torch.device("cuda"), random.Random(seed)
    layout = RecordLayout(ExpertShape(512, 4096, gated=False), torch.bfloat16)
    store = ExpertStore(1, 12, layout, 12, 0, pinned=True)
    store.settle()
    for entry in store.entries:
        store.host(entry, Part.WEIGHTS).fill_(value_of(entry))
    slab = device_slab(6, layout.weight_bytes, device)
    loader = new_loader(store, slab, Lane("upload", device, Recorder(device=device), None), 6)
    assert isinstance(loader, PortedLoader)
    found, expected = [], []
    for _ in range(100):
        pairs = list(zip(numbers.sample(range(12), 6), range(6), strict=True))
        updated = [store.entries[expert] for expert in numbers.sample(range(12), 3)]
        torch.cuda.synchronize()  # nobody reads what is updated now
        with store.lock:
            for entry in updated:
                entry.stale, entry.version = True, entry.version + 1
            sure = numbers.random() < 0.5
            loader.set_targets([Target(store.entries[e], s, "real", sure) for e, s in pairs])
        updates = threading.Thread(target=rewrite, args=(store, updated))
        updates.start()
        used = pairs[: numbers.randrange(7)]
        for expert, slot in used:
            loader.await_issued([(store.entries[expert], slot)], every=True)
            with store.lock:
                for mark in loader.ends([slot]):
                    compute_waits(device, mark)
                torch.cuda._sleep(20_000)
                found.append(slab[slot][:: 1 << 16].clone())
                loader.slots[slot].free = compute_mark(device)
            expected.append(value_of(store.entries[expert]))
        updates.join()
    loader.settle()
    loader.close()
    torch.cuda.synchronize()
    for sample, value in zip(found, expected, strict=True):
        assert (sample == value).all()
    store.close()
