"""Memory that processes share: the same bytes in all, in huge pages, and nothing remains of it."""

import os
import re
from pathlib import Path

import pytest
import torch

from overspill.core.errors import BudgetError
from overspill.tiers import shared_memory
from overspill.tiers.shared_memory import HUGE_PAGE, SharedMemory, map_file


def mapped() -> str:
    return Path("/proc/self/maps").read_text()


def test_another_mapping_sees_what_is_written_and_both_go_with_their_last_view() -> None:
    size = 3 * HUGE_PAGE + 5
    memory = SharedMemory(size, populated=HUGE_PAGE)
    other = map_file(memory.file, size)
    memory.close_file()
    memory.bytes[::1000] = 7
    assert torch.equal(other, memory.bytes)
    assert other.data_ptr() % HUGE_PAGE == memory.bytes.data_ptr() % HUGE_PAGE == 0
    view = other[5:6]
    del other, memory
    assert mapped().count("memfd:overspill") == 1
    del view
    assert "memfd:overspill" not in mapped()


def test_what_is_populated_is_in_huge_pages() -> None:
    memory = SharedMemory(8 * HUGE_PAGE, populated=4 * HUGE_PAGE)
    memory.close_file()
    pages = re.search(r"memfd:overspill.*?ShmemPmdMapped: +(\d+) kB", smaps(), re.DOTALL)
    size = re.search(r"memfd:overspill.*?Rss: +(\d+) kB", smaps(), re.DOTALL)
    assert pages is not None
    assert size is not None
    if int(pages[1]) == 0:
        pytest.skip("this system has no huge pages for shared memory")
    assert int(pages[1]) == int(size[1]) == 4 * HUGE_PAGE >> 10


def smaps() -> str:
    return Path("/proc/self/smaps").read_text()


def test_memory_that_the_system_refuses_is_a_budget_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BudgetError, match=r'memfd.*placement="static"'):
        SharedMemory(1 << 62, populated=0)  # the file is made, its mapping is not

    def refuse(name: str) -> int:
        raise PermissionError("not permitted")

    monkeypatch.setattr(shared_memory.os, "memfd_create", refuse)
    with pytest.raises(BudgetError, match="not permitted"):
        SharedMemory(4096, populated=0)
    assert len(os.listdir("/proc/self/fd")) == before
