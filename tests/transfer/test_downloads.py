"""Downloads of gradients: no buffer is reused under a copy, and their memory is bounded."""

import threading
import weakref

import pytest
import torch
from torch import Tensor

from overspill.core.errors import EngineError
from overspill.tiers.slab import HostSlab
from overspill.transfer.downloads import Downloads, GradientRing
from overspill.transfer.streams import COMPLETED
from tests.transfer.fakes import LAYOUT, GatedEvent, GatedStream, host_store


def ring_of(buffers: int) -> GradientRing:
    return GradientRing(host_store(1).sync, HostSlab("ring", buffers, LAYOUT.weight_bytes, False))


def test_a_buffer_has_one_user_at_a_time() -> None:
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


def test_take_blocks_while_all_buffers_are_in_use() -> None:
    ring, got = ring_of(2), []
    first = ring.take()
    ring.take()
    thread = threading.Thread(target=lambda: got.append(ring.take()))
    thread.start()
    thread.join(0.05)
    assert not got, "no buffer was free"
    ring.give(first)
    thread.join(60)
    assert got == [first]


def test_take_raises_when_the_update_thread_has_failed() -> None:
    store = host_store(1)
    ring = GradientRing(store.sync, HostSlab("ring", 1, LAYOUT.weight_bytes, False))
    ring.take()
    threading.Timer(0.05, store.sync.fail, [ValueError("no optimizer")]).start()
    with pytest.raises(EngineError, match="no optimizer"):
        ring.take()


def gradient(value: float, numel: int = 100) -> tuple[Tensor, Tensor]:
    return torch.zeros(numel), torch.full((numel,), value)


def test_a_download_waits_for_its_gradient_and_arrives_in_its_buffer() -> None:
    stream, made = GatedStream("download"), GatedEvent()
    downloads = Downloads(stream, limit=10_000)
    buffer, source = gradient(3.0)
    event = downloads.send([(buffer, source)], "expert 0.0", made)
    assert stream.after == [[made]]
    assert not event.done()
    assert torch.equal(buffer, source)


def test_the_gradients_on_the_device_stay_within_the_limit() -> None:
    stream = GatedStream("download")
    downloads = Downloads(stream, limit=1000)  # two gradients of 400 bytes
    for number in range(2):
        downloads.send([gradient(float(number))], "expert", COMPLETED)
    thread = threading.Thread(target=lambda: downloads.send([gradient(2.0)], "expert", COMPLETED))
    thread.start()
    thread.join(0.05)
    assert len(stream.events) == 2, "a third would exceed the limit"
    stream.events[1].open()
    thread.join(0.05)
    assert len(stream.events) == 2, "copies end in their order"
    stream.events[0].open()
    thread.join(60)
    assert len(stream.events) == 3


def test_a_gradient_that_shares_its_allocation_counts_once() -> None:
    stream = GatedStream("download")
    downloads = Downloads(stream, limit=800)
    wave = torch.ones(2, 100)  # 800 bytes
    for expert in wave:
        downloads.send([(torch.zeros(100), expert)], "expert", COMPLETED)
    assert len(stream.events) == 2


def test_a_gradient_is_kept_alive_until_its_copy_has_ended() -> None:
    stream = GatedStream("download")
    downloads = Downloads(stream, limit=10_000)
    buffer, source = gradient(1.0)
    alive = weakref.ref(source)
    downloads.send([(buffer, source)], "expert", COMPLETED)
    del source
    assert alive() is not None, "its memory could be given to another tensor"
    stream.arrive()
    downloads.wait()
    assert alive() is None


def test_wait_waits_for_every_copy() -> None:
    stream = GatedStream("download")
    downloads = Downloads(stream, limit=10_000)
    for number in range(3):
        downloads.send([gradient(float(number))], "expert", COMPLETED)
    thread = threading.Thread(target=downloads.wait)
    thread.start()
    for event in stream.events:
        thread.join(0.02)
        assert thread.is_alive()
        event.open()
    thread.join(60)
    assert not thread.is_alive()
