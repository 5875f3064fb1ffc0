"""Uploads from replicas: copies of experts on the device, which are lent for a while."""

import threading
import weakref

import pytest
import torch
from torch import Tensor

from overspill.tiers.replicas import Replica
from overspill.transfer.uploader import REPLICAS
from tests.transfer.fakes import rewrite, value_of
from tests.transfer.upload_bench import HALVES, KINDS, RECORD, Bench

POISON = 255


def lend(bench: Bench, expert: int, value: int | None = None) -> Tensor:
    """The replica, which can be told from host memory by `value`."""
    entry = bench.entry(expert)
    memory = torch.full((RECORD,), value or value_of(entry), dtype=torch.uint8)
    with bench.store.sync.lock:
        lent = {**bench.store.replicas.lent, entry.number: Replica(memory, entry.version)}
        bench.store.replicas.lent = lent
    return memory


def withdraw(bench: Bench) -> None:
    with bench.store.sync.lock:
        bench.store.replicas.lent = {}
    bench.uploader.withdraw_replicas()


@pytest.mark.parametrize("kind", KINDS)
def test_uploads_read_what_is_lent_and_count_it_apart(kind: str) -> None:
    bench = Bench(kind, experts=3, slots=3)
    lend(bench, 1, 200)
    bench.target((0, 0), (1, 1), (2, 2))
    bench.wait_issued((0, 0), (1, 1), (2, 2))
    assert bench.holds(0, 1)
    assert bench.holds(1, 200)
    assert bench.holds(2, 3)
    counters = bench.stream.recorder.counters()
    assert (counters["upload"], counters[REPLICAS]) == (2 * RECORD, RECORD)
    withdraw(bench)
    bench.target((0, 0), (1, 1))
    assert bench.is_issued(1, 1), "what has arrived stays"
    bench.close()


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_of_old_weights_are_not_read(kind: str) -> None:
    bench = Bench(kind, experts=2, slots=2)
    lend(bench, 0, 200)
    bench.store.begin_update(bench.entry(0))
    bench.target((0, 0), (1, 1))
    bench.wait_issued((1, 1))
    assert not bench.is_issued(0, 0), "it is being updated"
    rewrite(bench.store, [bench.entry(0)])
    bench.wait_issued((0, 0))
    assert bench.holds(0, value_of(bench.entry(0)))
    bench.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_the_rest_of_an_upload_comes_from_host_memory_once_its_replica_is_withdrawn(
    kind: str, pieces: int
) -> None:
    """Two pieces are in flight at most: one of the first expert, or both, or one of the second."""
    bench = Bench(kind, experts=3, slots=3, sizes=HALVES, at_once=False)
    replicas = [lend(bench, expert) for expert in range(3)]
    bench.target((0, 0), (1, 1), (2, 2))
    bench.issued(2)
    for number in range(pieces):
        bench.arrive()
        bench.issued(3 + number)
    withdraw(bench)
    while bench.in_flight:  # what was issued may still read the replica
        bench.arrive()
    for memory in replicas:
        memory.fill_(POISON)
    bench.drain()
    bench.wait_issued((0, 0), (1, 1), (2, 2))
    assert all(bench.holds(slot, slot + 1) for slot in range(3))
    bench.close()


@pytest.mark.parametrize("kind", KINDS)
def test_no_replica_is_referenced_once_it_is_withdrawn(kind: str) -> None:
    """Its memory may be needed for something else."""
    bench = Bench(kind, experts=1, slots=1)
    memory = weakref.ref(lend(bench, 0))
    bench.target((0, 0))
    bench.wait_issued((0, 0))
    withdraw(bench)
    bench.uploader.wait_idle()
    assert memory() is None
    bench.close()


@pytest.mark.parametrize("kind", KINDS)
def test_withdrawing_is_allowed_once_the_uploader_is_closed(kind: str) -> None:
    """A pass fails when its engine is closed, and its replicas are withdrawn then."""
    bench = Bench(kind, experts=2, slots=2)
    lend(bench, 0)
    bench.target((0, 0), (1, 1))
    bench.wait_issued((0, 0), (1, 1))
    bench.close()
    issued = list(bench._sources)
    withdraw(bench)
    assert list(bench._sources) == issued


@pytest.mark.parametrize("kind", KINDS)
def test_withdrawing_waits_for_a_copy_that_is_being_issued(kind: str) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        begun.set()
        assert go.wait(60)

    bench = Bench(kind, experts=1, slots=1, inject=wait)
    replica = lend(bench, 0)
    bench.target((0, 0))
    assert begun.wait(60)

    def end() -> None:
        withdraw(bench)
        replica.fill_(POISON)

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(0.05)
    go.set()
    ending.join(60)
    bench.wait_issued((0, 0))
    assert bench.holds(0, 1)
    bench.close()
