"""Memory allocated once, in slots that can be read and written by direct I/O."""

import errno
import mmap
import os
import threading
import time
import weakref
from typing import NoReturn

import pytest
import torch

from overspill.core.errors import BudgetError
from overspill.tiers import slab as module
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab, device_slab


def test_slots_are_aligned_zeroed_and_adjacent() -> None:
    slab = HostSlab("weights", 5, 3 * ALIGN, pinned=False)
    assert len(slab) == 5
    assert slab.nbytes == 5 * 3 * ALIGN
    starts = [slab[slot].data_ptr() for slot in range(5)]
    assert all(start % ALIGN == 0 for start in starts)
    assert [start - starts[0] for start in starts] == [slot * 3 * ALIGN for slot in range(5)]
    assert not slab.memory.any()
    slab[3].fill_(7)
    assert slab.memory.view(5, -1).sum(1).tolist() == [0, 0, 0, 7 * 3 * ALIGN, 0]
    slab.close()


def test_slots_may_have_sizes_of_their_own() -> None:
    sizes = [ALIGN, 3 * ALIGN, ALIGN, ALIGN, 2 * ALIGN]
    seen: list[int] = []
    slab = HostSlab(
        "weights", 5, 3 * ALIGN, False, lambda _, done, __: seen.append(done),
        piece_bytes=2 * ALIGN, sizes=sizes,
    )  # fmt: skip
    assert seen == [ALIGN, 4 * ALIGN, 6 * ALIGN, 8 * ALIGN], "pieces are whole slots"
    for slot in range(5):
        slab[slot].fill_(slot + 1)
    assert [len(slab[slot]) for slot in range(5)] == sizes
    assert slab.memory.view(-1, ALIGN)[:, 0].tolist() == [1, 2, 2, 2, 3, 4, 5, 5]
    slab.extend(1)
    assert len(slab[5]) == 3 * ALIGN
    assert slab.nbytes == 11 * ALIGN
    slab.close()


def test_a_slab_without_slots_allocates_nothing() -> None:
    slab = HostSlab("weights", 0, ALIGN, pinned=False)
    assert len(slab) == slab.nbytes == 0
    slab.close()


def test_progress_ends_at_the_total_size() -> None:
    seen: list[tuple[str, int, int]] = []
    slab = HostSlab(
        "states", 10, ALIGN, False, lambda *args: seen.append(args), piece_bytes=4 * ALIGN
    )
    done = [at for _, at, _ in seen]
    assert len(seen) == 3
    assert done == sorted(done)
    assert seen[-1] == ("allocating memory for states", slab.nbytes, slab.nbytes)


def test_failed_allocation_names_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", no_memory)
    with pytest.raises(BudgetError, match=r"no 8\.0 KiB for weights; lower --host-memory"):
        HostSlab("weights", 2, ALIGN, pinned=False)


def test_close_releases_the_memory() -> None:
    slab = HostSlab("weights", 3, ALIGN, pinned=False)
    slots = weakref.ref(slab.memory)
    slab.close()
    assert slots() is None
    assert len(slab) == 0


@pytest.mark.parametrize("background", [False, True])
def test_allocation_threads_have_ended(background: bool) -> None:
    for _ in range(50):
        slab = HostSlab("weights", 64, ALIGN, False, background=background, piece_bytes=4 * ALIGN)
        if background:
            slab.close()
        assert not [t.name for t in threading.enumerate() if t.name.startswith("overspill-")]


class FakeRuntime:
    """The CUDA runtime of a system that allows to pin `most` pieces, each in so many seconds."""

    def __init__(self, most: int = 100, seconds: float = 0.0) -> None:
        self.pinned: set[int] = set()
        self.begun = threading.Event()
        self._most, self._seconds = most, seconds

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.begun.set()
        time.sleep(self._seconds)
        if len(self.pinned) == self._most:
            return 2
        self.pinned.add(pointer)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        self.pinned.remove(pointer)
        return 0


@pytest.mark.parametrize("background", [False, True])
def test_refused_pinning_is_named_and_leaves_nothing_pinned(
    background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime(most=2)
    pinned = runtime.pinned
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(module, "_THREADS", 1)
    message = r"pinning 16\.0 KiB .* failed \(2\); lower --host-memory or raise the memlock limit"

    def allocate() -> HostSlab:
        return HostSlab("weights", 4, ALIGN, True, background=background, piece_bytes=ALIGN)

    if background:
        slab = allocate()
        slab[3].fill_(7)
        with pytest.raises(BudgetError, match=message):
            slab.wait_allocated()
        assert slab[3].eq(7).all(), "the owner closes it"
        slab.close()
    else:
        with pytest.raises(BudgetError, match=message):
            allocate()
    assert not pinned
    assert not [t.name for t in threading.enumerate() if t.name.startswith("overspill-")]


def test_device_slots_form_one_tensor() -> None:
    slots = device_slab(3, ALIGN, torch.device("cpu"))
    assert slots.shape == (3, ALIGN)
    assert slots.is_contiguous()
    assert not slots.any()


@pytest.mark.gpu
def test_pinned_slots_are_pinned_until_close() -> None:
    slab = HostSlab("weights", 3, ALIGN, pinned=True)
    assert all(slab[slot].is_pinned() for slot in range(3))
    slot = slab[0]
    slab.close()
    assert not slot.is_pinned()


def test_pinned_memory_reads_as_zero_in_a_forked_child() -> None:
    """If the kernel has huge pages; otherwise the memory is shared."""
    private = os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled")
    memory = module.anonymous_memory(4 << 20, pinned=True)
    memory[:3] = b"abc"
    child = os.fork()
    if child == 0:
        seen = memory[:3]
        memory.close()
        os._exit(0 if seen == (b"\0\0\0" if private else b"abc") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory[:3] == b"abc"
    memory.close()


def test_a_slab_that_nobody_closes_is_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slab = HostSlab("weights", 2, ALIGN, pinned=True)
    assert len(runtime.pinned) == 1
    del slab
    assert not runtime.pinned


def test_a_slab_that_is_given_up_while_threads_allocate_it_is_unpinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime(seconds=0.05)
    pinned, begun = runtime.pinned, runtime.begun
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(module, "_THREADS", 2)
    slab = HostSlab("weights", 4, ALIGN, True, background=True, piece_bytes=ALIGN)
    begun.wait()
    del slab
    assert not pinned
    assert not [t.name for t in threading.enumerate() if t.name.startswith("overspill-")]
