"""Memory taken once, in rows that can be read and written by direct I/O."""

import errno
import mmap
import os
import threading
import weakref
from typing import NoReturn

import pytest
import torch

from overspill.core.errors import BudgetError
from overspill.tiers import slab as module
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab, device_slab


def test_rows_are_aligned_zeroed_and_side_by_side() -> None:
    slab = HostSlab("weights", 5, 3 * ALIGN, pinned=False)
    assert len(slab) == 5
    assert slab.nbytes == 5 * 3 * ALIGN
    starts = [slab[row].data_ptr() for row in range(5)]
    assert all(start % ALIGN == 0 for start in starts)
    assert [start - starts[0] for start in starts] == [row * 3 * ALIGN for row in range(5)]
    assert not slab.rows.any()
    slab[3].fill_(7)
    assert slab.rows.sum(1).tolist() == [0, 0, 0, 7 * 3 * ALIGN, 0]
    slab.close()


def test_a_slab_of_no_rows_takes_nothing() -> None:
    slab = HostSlab("weights", 0, ALIGN, pinned=False)
    assert len(slab) == slab.nbytes == 0
    slab.close()


def test_progress_ends_at_the_whole_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 4 * ALIGN)
    seen: list[tuple[str, int, int]] = []
    slab = HostSlab("states", 10, ALIGN, False, lambda *args: seen.append(args))
    done = [at for _, at, _ in seen]
    assert len(seen) == 3
    assert done == sorted(done)
    assert seen[-1] == ("taking memory for states", slab.nbytes, slab.nbytes)


def test_memory_that_is_not_there_names_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", no_memory)
    with pytest.raises(BudgetError, match=r"no 8\.0 KiB for weights; lower --host-memory"):
        HostSlab("weights", 2, ALIGN, pinned=False)


def test_closed_it_lets_its_memory_go() -> None:
    slab = HostSlab("weights", 3, ALIGN, pinned=False)
    rows = weakref.ref(slab.rows)
    slab.close()
    assert rows() is None
    assert len(slab) == 0


@pytest.mark.parametrize("background", [False, True])
def test_those_who_took_the_memory_are_gone(background: bool) -> None:
    for _ in range(50):
        slab = HostSlab("weights", 64, ALIGN, pinned=False, background=background)
        if background:
            slab.close()
        assert not [t.name for t in threading.enumerate() if t.name.startswith("overspill-")]


def test_device_slots_form_one_tensor() -> None:
    slots = device_slab(3, ALIGN, torch.device("cpu"))
    assert slots.shape == (3, ALIGN)
    assert slots.is_contiguous()
    assert not slots.any()


@pytest.mark.gpu
def test_pinned_rows_are_pinned_and_released() -> None:
    slab = HostSlab("weights", 3, ALIGN, pinned=True)
    assert all(slab[row].is_pinned() for row in range(3))
    row = slab[0]
    slab.close()
    assert not row.is_pinned()


def test_private_memory_is_zero_in_a_forked_child_and_costs_it_nothing() -> None:
    """What pinned slabs are made of, if the kernel has it; else they are shared."""
    private = os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled")
    memory = module._anonymous(4 << 20, pinned=True)
    memory[:3] = b"abc"
    child = os.fork()
    if child == 0:
        seen = memory[:3]
        memory.close()
        os._exit(0 if seen == (b"\0\0\0" if private else b"abc") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory[:3] == b"abc"
    memory.close()
