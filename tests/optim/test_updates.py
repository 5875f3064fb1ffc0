"""Expert-wise updates: each waits for its complete gradient and uses it once."""

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from overspill.core.errors import EngineError
from overspill.optim.arguments import AdamHyper
from overspill.optim.updates import Update, Updates
from overspill.tiers.entry import Entry, Part
from overspill.tiers.slab import HostSlab
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.downloads import GradientRing
from overspill.transfer.stager import Stager
from overspill.transfer.streams import COMPLETED, Inject
from tests.transfer.fakes import LAYOUT, GatedEvent, disk_store, host_store

NUMEL = LAYOUT.shape.numel
HYPER = AdamHyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.5, step=1)


class Bench:
    """Experts of weight 1, update threads and a ring of two buffers."""

    def __init__(self, store: ExpertStore, inject: Inject | None = None, threads: int = 1) -> None:
        self.store = store
        for part in (Part.STATES, Part.GRADS):
            store.allocate(part)
        for entry in store.places.entries:
            store.write_part(entry, Part.WEIGHTS, lambda memory: LAYOUT.weights(memory).fill_(1.0))
        self.squares = torch.zeros(len(store.places.entries))
        self.added_squares = torch.zeros(len(store.places.entries))
        self.ring = GradientRing(store.sync, HostSlab("ring", 2, LAYOUT.weight_bytes, False))
        self.recorder = Recorder()
        squares = self.squares, self.added_squares
        self.updates = Updates(store, *squares, threads, self.recorder, inject)
        self.updates.start(self.ring)

    def receive(self, entry: Entry, value: float, is_added: bool = False) -> int:
        """A gradient arrives in a ring buffer."""
        buffer = self.ring.take()
        LAYOUT.weights(self.ring.buffers[buffer]).fill_(value)
        (self.added_squares if is_added else self.squares)[entry.number] = NUMEL * value**2
        return buffer

    def weights(self, entry: Entry) -> Tensor:
        return LAYOUT.weights(self.store.read_part(entry, Part.WEIGHTS)).clone()

    def close(self) -> None:
        self.updates.close()
        self.store.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(host_store(4))
    yield bench
    bench.close()
    assert not [t for t in threading.enumerate() if t.name == "overspill-updates"]


def after_one_step(grad: float, weight: float = 1.0, hyper: AdamHyper = HYPER) -> Tensor:
    """The oracle: torch.optim.AdamW on a parameter of its own."""
    parameter = torch.nn.Parameter(torch.full((NUMEL,), weight))
    betas = (hyper.beta1, hyper.beta2)
    optimizer = torch.optim.AdamW(
        [parameter], hyper.lr, betas, hyper.eps, weight_decay=hyper.weight_decay
    )
    parameter.grad = torch.full((NUMEL,), grad)
    optimizer.step()
    return parameter.detach()


def test_an_update_does_not_read_its_gradient_before_the_copy_has_ended(bench: Bench) -> None:
    entry, arrived = bench.store.places.entries[1], GatedEvent()
    buffer = bench.ring.take()
    bench.updates.submit(Update(entry, arrived, buffer, hyper=HYPER))
    time.sleep(0.05)
    assert torch.equal(bench.weights(entry), torch.ones(NUMEL))
    # only now the gradient arrives
    LAYOUT.weights(bench.ring.buffers[buffer]).fill_(-3.0)
    arrived.open()
    bench.updates.wait_idle()
    torch.testing.assert_close(bench.weights(entry), after_one_step(-3.0))


def test_an_update_returns_the_buffer_and_makes_the_weights_current(bench: Bench) -> None:
    entry = bench.store.places.entries[0]
    bench.store.begin_update(entry)
    assert not entry.readable
    bench.updates.submit(Update(entry, COMPLETED, bench.receive(entry, 2.0), hyper=HYPER))
    bench.updates.wait_idle()
    bench.ring.check_conserved()
    bench.store.places.check_conserved()
    assert entry.readable
    for other in bench.store.places.entries[1:]:
        assert torch.equal(bench.weights(other), torch.ones(NUMEL))


def test_without_a_gradient_an_expert_decays(bench: Bench) -> None:
    entry = bench.store.places.entries[3]
    bench.updates.submit(Update(entry, COMPLETED, hyper=HYPER))
    bench.updates.wait_idle()
    torch.testing.assert_close(bench.weights(entry), torch.full((NUMEL,), 1 - 0.1 * 0.5))


def test_micro_batches_add_up_and_the_sum_is_used_once(bench: Bench) -> None:
    entry = bench.store.places.entries[2]
    LAYOUT.weights(bench.store.host(entry, Part.GRADS)).fill_(1.0)
    for value in (2.0, -4.5):
        buffer = bench.receive(entry, value)
        bench.updates.submit(Update(entry, COMPLETED, buffer, accumulate=True))
    bench.updates.wait_idle()
    assert torch.equal(bench.weights(entry), torch.ones(NUMEL)), "the gradient is only kept"
    assert bench.squares[entry.number].item() == pytest.approx(NUMEL * 1.5**2)
    bench.updates.submit(Update(entry, COMPLETED, use_kept=True, hyper=HYPER))
    bench.updates.wait_idle()
    torch.testing.assert_close(bench.weights(entry), after_one_step(-1.5))


def test_the_last_micro_batch_is_added_in_the_update(bench: Bench) -> None:
    entry = bench.store.places.entries[2]
    LAYOUT.weights(bench.store.host(entry, Part.GRADS)).fill_(1.0)
    bench.store.begin_update(entry)
    buffer = bench.receive(entry, -2.5, is_added=True)
    bench.updates.submit(Update(entry, COMPLETED, buffer, accumulate=True, hyper=HYPER))
    bench.updates.wait_idle()
    assert entry.readable
    bench.ring.check_conserved()
    torch.testing.assert_close(bench.weights(entry), after_one_step(-1.5))


@pytest.mark.parametrize("kept", [1.0, math.nan])
def test_a_sum_that_is_not_finite_changes_nothing_and_is_noted(kept: float, bench: Bench) -> None:
    entry = bench.store.places.entries[0]
    LAYOUT.weights(bench.store.host(entry, Part.GRADS)).fill_(kept)
    bench.squares[entry.number] = NUMEL * kept**2
    added = math.inf if math.isfinite(kept) else 1.0
    buffer = bench.receive(entry, added, is_added=True)
    bench.updates.submit(Update(entry, COMPLETED, buffer, accumulate=True, hyper=HYPER))
    bench.updates.wait_idle()
    assert torch.equal(bench.weights(entry), torch.ones(NUMEL))
    assert not bench.squares[entry.number].isfinite()
    bench.ring.check_conserved()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float, bench: Bench) -> None:
    entry = bench.store.places.entries[0]
    before = bench.store.read_part(entry, Part.STATES).clone()
    bench.updates.submit(Update(entry, COMPLETED, bench.receive(entry, value), hyper=HYPER))
    bench.updates.wait_idle()
    assert torch.equal(bench.weights(entry), torch.ones(NUMEL))
    assert torch.equal(bench.store.read_part(entry, Part.STATES), before)
    bench.ring.check_conserved()


def test_the_lowest_layer_is_updated_first() -> None:
    held, go = threading.Event(), threading.Event()

    def inject(kind: str) -> None:
        held.set()
        assert go.wait(60)

    bench = Bench(host_store(4), inject)
    bench.recorder.start()
    bench.updates.submit(Update(bench.store.places.entries[3], COMPLETED, hyper=HYPER))
    assert held.wait(60)
    for number in (2, 0, 1):
        bench.updates.submit(Update(bench.store.places.entries[number], COMPLETED, hyper=HYPER))
    go.set()
    bench.updates.wait_idle()
    order = [span.name for span in bench.recorder.spans() if span.row == "optimizer"]
    assert order == ["expert 0.3", "expert 0.0", "expert 0.1", "expert 0.2"]
    bench.close()


def test_a_failed_update_is_raised_where_updates_are_awaited() -> None:
    def fail(kind: str) -> None:
        raise MemoryError("no memory")

    bench = Bench(host_store(1), fail)
    bench.updates.submit(Update(bench.store.places.entries[0], COMPLETED, hyper=HYPER))
    with pytest.raises(EngineError, match="no memory"):
        bench.updates.wait_idle()
    bench.close()


def test_with_many_cores_several_experts_are_updated_at_a_time() -> None:
    together = threading.Barrier(3)
    bench = Bench(host_store(4), lambda _: together.wait(60) and None, threads=3)
    for entry in bench.store.places.entries[:3]:
        bench.updates.submit(Update(entry, COMPLETED, hyper=HYPER))
    bench.updates.wait_idle()
    for entry in bench.store.places.entries[:3]:
        torch.testing.assert_close(bench.weights(entry), torch.full((NUMEL,), 1 - 0.1 * 0.5))
    bench.close()


def test_a_held_up_update_does_not_hold_up_other_experts() -> None:
    go, held = threading.Event(), threading.Event()

    def inject(kind: str) -> None:
        if not held.is_set():
            held.set()
            assert go.wait(60)

    bench = Bench(host_store(4), inject, threads=2)
    first, second = bench.store.places.entries[:2]
    bench.store.begin_update(second)
    bench.updates.submit(Update(first, COMPLETED, hyper=HYPER))
    assert held.wait(60)
    bench.updates.submit(Update(second, COMPLETED, hyper=HYPER))
    bench.store.sync.wait(lambda: second.readable, "the update of the second expert")
    assert not bench.updates.idle()
    go.set()
    bench.updates.wait_idle()
    bench.close()


def test_updates_of_one_expert_never_overlap() -> None:
    """Every micro-batch counts, although threads are free while another is added."""
    bench = Bench(host_store(2), lambda _: time.sleep(0.001), threads=4)
    for number in range(40):
        entry = bench.store.places.entries[number % 2]
        buffer = bench.receive(entry, 1.0)
        bench.updates.submit(Update(entry, COMPLETED, buffer, accumulate=True))
    bench.updates.wait_idle()
    for entry in bench.store.places.entries:
        gradient = LAYOUT.weights(bench.store.host(entry, Part.GRADS))
        assert torch.equal(gradient, torch.full((NUMEL,), 20.0))
        assert bench.squares[entry.number].item() == NUMEL * 20.0**2
    bench.ring.check_conserved()
    bench.close()


def test_after_a_failure_the_other_update_threads_end() -> None:
    def fail(kind: str) -> None:
        raise MemoryError("no memory")

    bench = Bench(host_store(4), fail, threads=3)
    arrived = GatedEvent()
    for entry in bench.store.places.entries:
        bench.updates.submit(Update(entry, arrived, hyper=HYPER))
    arrived.open()
    with pytest.raises(EngineError, match="no memory"):
        bench.updates.wait_idle()
    bench.close()
    assert not [t for t in threading.enumerate() if t.name == "overspill-updates"]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("cache", [1, 2, 3])
def test_experts_on_disk_are_read_updated_and_written_back(
    cache: int, threads: int, tmp_path: Path
) -> None:
    """All at once, through few host slots, with kept gradients on disk too."""
    store = disk_store(6, 1, cache, tmp_path)
    bench = Bench(store, lambda _: time.sleep(0.001), threads)
    stager = Stager(store, bench.updates.waiting, 2, Recorder(), lambda _: time.sleep(0.001))
    for entry in store.places.entries:
        store.write_part(
            entry, Part.GRADS, lambda m, e=entry: LAYOUT.weights(m).fill_(e.number - 2.5)
        )
        bench.squares[entry.number] = 1.0
    for entry in reversed(store.places.entries):
        buffer = bench.receive(entry, 1.0)
        bench.updates.submit(Update(entry, COMPLETED, buffer, accumulate=True))
    for entry in store.places.entries:
        bench.updates.submit(Update(entry, COMPLETED, use_kept=True, hyper=HYPER))
    bench.updates.wait_idle()
    store.sync.wait(stager.idle, "disk transfers")
    store.places.check_conserved()
    for entry in store.places.entries:
        torch.testing.assert_close(bench.weights(entry), after_one_step(entry.number - 1.5))
    bench.updates.close()
    stager.close()
    store.close()
