"""Measures the machine: the rates at which the link and the CPU read experts in host memory."""

import statistics
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from overspill.compute.cpu_kernel import cpu_isa, read_bandwidth
from overspill.hardware.profile import MachineProfile
from overspill.probe.clock import BackgroundCopies, Effort, Steps, copy_seconds, repeat
from overspill.probe.memory import buffers, cold_bytes
from overspill.tiers.slab import Progress, device_slab
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import CopyStream


def measure_machine(
    device: torch.device,
    threads: int,
    progress: Progress | None = None,
    effort: Effort | None = None,
) -> MachineProfile:
    """Measure the rates of this machine. Without a GPU, `device` is the CPU, and copies are those
    within host memory."""
    effort = effort or Effort()
    size = effort.copy
    cold = cold_bytes() if effort.cold is None else effort.cold
    steps = Steps(progress, 2)
    slab = buffers(max(1, cold // size), size, pinned=device.type == "cuda")
    with torch_threads(threads), closing(slab):
        steps.begin("copies")
        (target,), sources = device_slab(1, size, device), slab.memory.view(-1, size)
        up = CopyStream("upload", device, Recorder(), None)
        copies = BackgroundCopies(up, lambda n: [(target, sources[n % len(sources)])])
        link = size / copy_seconds(effort.seconds, copies)
        steps.begin("host memory")
        rates = repeat(lambda: read_bandwidth(slab.memory, threads), effort.seconds)
    steps.end()
    return MachineProfile(
        cores=threads, kernel=cpu_isa() or "none", link=link, host_read=statistics.median(rates)
    )


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
