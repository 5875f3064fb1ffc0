"""Copies, events and signals of the CUDA driver, against those of torch."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from overspill.tiers.slab import HostSlab
from overspill.transfer import driver
from overspill.transfer.mapped import on_device

CPU = torch.device("cpu")


def test_on_a_cpu_host_memory_is_device_memory() -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    assert on_device(memory, CPU) is memory


on_a_gpu = pytest.mark.gpu


@pytest.fixture
def slab() -> Iterator[HostSlab]:
    slab = HostSlab("test", 2, 1 << 20, pinned=True)
    yield slab
    torch.cuda.synchronize()
    slab.close()


@on_a_gpu
def test_copies_run_in_both_directions_in_the_order_of_their_stream(slab: HostSlab) -> None:
    stream = torch.cuda.Stream()
    slab[0].random_(0, 255)
    on_gpu = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    driver.copy_on(stream, on_gpu, slab[0])
    driver.copy_on(stream, slab[1], on_gpu)
    end = driver.new_event(stream.device, blocking=True)
    end.record(stream)
    end.synchronize()
    assert end.query()
    assert torch.equal(slab[0], slab[1])
    assert torch.equal(on_gpu.cpu(), slab[0])


@on_a_gpu
def test_tensors_that_are_not_contiguous_are_copied_by_torch(slab: HostSlab) -> None:
    stream = torch.cuda.Stream()
    source = torch.arange(64, dtype=torch.uint8, device="cuda").view(8, 8).t()
    torch.cuda.synchronize()
    target = slab[0][:64].view(8, 8)
    driver.copy_on(stream, target, source)
    stream.synchronize()
    assert torch.equal(target, source.cpu())


@on_a_gpu
def test_a_stream_waits_for_an_event_of_another(slab: HostSlab) -> None:
    late, stream = torch.cuda.Stream(), torch.cuda.Stream()
    value = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(late):
        torch.cuda._sleep(50_000_000)
        value.fill_(7)
    event = driver.new_event(late.device, blocking=False)
    event.record(late)
    assert not event.query()
    event.wait(stream)
    with torch.cuda.stream(stream):
        seen = value.clone()
    stream.synchronize()
    assert seen.item() == 7


@on_a_gpu
def test_any_thread_may_copy(slab: HostSlab) -> None:
    stream = torch.cuda.Stream()
    on_gpu = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    slab[0].fill_(5)
    torch.cuda.synchronize()
    thread = threading.Thread(target=driver.copy_on, args=(stream, on_gpu, slab[0]))
    thread.start()
    thread.join()
    stream.synchronize()
    assert (on_gpu == 5).all()


@on_a_gpu
def test_kernels_read_and_write_pinned_memory(slab: HostSlab) -> None:
    mapped = on_device(slab[0], torch.device("cuda", 0))
    mapped[:1000].fill_(3)
    torch.cuda.synchronize()
    assert (slab[0][:1000] == 3).all()
    slab[0][:1000] = 9
    assert int(mapped[:1000].sum()) == 9000


@on_a_gpu
def test_stream_and_host_wait_for_each_others_signals(slab: HostSlab) -> None:
    stream = torch.cuda.Stream()
    flags = slab[1][:8].view(torch.int32)
    made, done = flags.data_ptr(), flags.data_ptr() + 4
    if not driver.can_signal(stream, made):
        pytest.skip("the driver lacks stream memory operations")
    flags.zero_()
    mapped = on_device(slab[0], torch.device("cuda", 0))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        mapped[:16].fill_(1)
        driver.signal(stream, made, 1)
        driver.await_signal(stream, done, 1)
        result = mapped[:16].clone()
    deadline = time.monotonic() + 60
    while flags[0] != 1:
        assert time.monotonic() < deadline
    assert (slab[0][:16] == 1).all(), "the kernel ran before the signal"
    assert not stream.query(), "the stream waits for the host"
    slab[0][:16] = 2
    flags[1] = 1
    stream.synchronize()
    assert (result == 2).all()


@pytest.mark.gpu
def test_an_own_stream_is_none_of_torchs() -> None:
    device = torch.device("cuda", 0)
    own = driver.own_stream(device, "test")
    assert own is driver.own_stream(device, "test")
    assert own.cuda_stream != driver.own_stream(device, "other").cuda_stream
    assert own.cuda_stream not in {torch.cuda.Stream(device).cuda_stream for _ in range(100)}
    with torch.cuda.stream(own):
        total = torch.ones(1000, device=device).sum()
    own.synchronize()
    assert total.item() == 1000
