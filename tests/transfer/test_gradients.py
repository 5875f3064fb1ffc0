"""Gradients on their way: no buffer is reused under a copy, and never too many are out."""

import threading
import weakref

import pytest
import torch
from torch import Tensor

from overspill.core.errors import EngineError
from overspill.tiers.slab import HostSlab
from overspill.transfer.gradients import Downloads, GradientRing
from overspill.transfer.lanes import PASSED, Mark
from tests.transfer.fakes import LAYOUT, GatedLane, GatedMark, host_store


def ring_of(buffers: int) -> GradientRing:
    return GradientRing(host_store(1), HostSlab("ring", buffers, LAYOUT.weight_bytes, False))


def test_every_buffer_is_given_to_one_at_a_time() -> None:
    ring = ring_of(3)
    taken = [ring.take() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2]
    with pytest.raises(AssertionError, match="leaked"):
        ring.check_conserved()
    ring.give(taken[1])
    assert ring.take() == taken[1]
    for index in taken:
        ring.give(index)
    ring.check_conserved()


def test_who_takes_waits_while_all_are_in_use() -> None:
    ring, got = ring_of(2), []
    one = ring.take()
    ring.take()
    thread = threading.Thread(target=lambda: got.append(ring.take()))
    thread.start()
    thread.join(0.05)
    assert not got, "there was no buffer to give"
    ring.give(one)
    thread.join(10)
    assert got == [one]


def test_who_waits_for_a_buffer_hears_that_the_optimizer_failed() -> None:
    ring = ring_of(1)
    ring.take()
    threading.Timer(0.05, ring.store.fail, [ValueError("no optimizer")]).start()
    with pytest.raises(EngineError, match="no optimizer"):
        ring.take()


class MarkedLane(GatedLane):
    """Every copy ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[GatedMark] = []

    def copy(self, *args: object, **options: object) -> Mark:
        super().copy(*args, **options)  # type: ignore[arg-type]
        self.marks.append(GatedMark())
        return self.marks[-1]


def gradient(value: float, numel: int = 100) -> tuple[Tensor, Tensor]:
    return torch.zeros(numel), torch.full((numel,), value)


def test_a_download_waits_for_the_gradient_and_lands_where_it_belongs() -> None:
    lane, made = MarkedLane(), GatedMark()
    downloads = Downloads(lane, limit=10_000)
    into, source = gradient(3.0)
    mark = downloads.send([(into, source)], "expert 0.0", made)
    assert lane.after == [[made]]
    assert not mark.done()
    assert torch.equal(into, source)


def test_no_more_than_the_limit_is_on_the_device_at_once() -> None:
    lane = MarkedLane()
    downloads = Downloads(lane, limit=1000)  # two gradients of 400 bytes
    for number in range(2):
        downloads.send([gradient(float(number))], "expert", PASSED)
    thread = threading.Thread(target=lambda: downloads.send([gradient(2.0)], "expert", PASSED))
    thread.start()
    thread.join(0.05)
    assert len(lane.names) == 2, "a third would have gone over the limit"
    lane.marks[1].open()
    thread.join(0.05)
    assert len(lane.names) == 2, "copies end in their order"
    lane.marks[0].open()
    thread.join(10)
    assert len(lane.names) == 3


def test_a_gradient_is_kept_alive_until_its_copy_has_ended() -> None:
    lane = MarkedLane()
    downloads = Downloads(lane, limit=10_000)
    into, source = gradient(1.0)
    alive = weakref.ref(source)
    downloads.send([(into, source)], "expert", PASSED)
    del source
    assert alive() is not None, "its memory could be given to another tensor"
    lane.marks[0].open()
    downloads.wait()
    assert alive() is None


def test_waiting_waits_for_every_copy() -> None:
    lane = MarkedLane()
    downloads = Downloads(lane, limit=10_000)
    for number in range(3):
        downloads.send([gradient(float(number))], "expert", PASSED)
    thread = threading.Thread(target=downloads.wait)
    thread.start()
    for mark in lane.marks:
        thread.join(0.02)
        assert thread.is_alive()
        mark.open()
    thread.join(10)
    assert not thread.is_alive()
