"""Record files: what was written is read, by many threads; what cannot be is a clear error."""

import errno
import logging
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from overspill.core.errors import DiskError
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab
from overspill.tiers.ssd import RecordFile, check_folder

ROW = 2 * ALIGN


def bytes_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (ROW,), dtype=torch.uint8, generator=generator)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    file, slab = RecordFile(tmp_path / "r.bin", 4, ROW), HostSlab("w", 4, ROW, False)
    assert os.fstat(file.fd).st_size == file.nbytes == 4 * ROW
    for row in (2, 0, 3, 1):
        slab[0].copy_(bytes_of(row))
        file.write(row, slab[0])
    for row in range(4):
        file.read(row, slab[1])
        assert torch.equal(slab[1], bytes_of(row))
    file.close()


def test_the_space_is_taken_before_the_first_write(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.bin", 16, ROW)
    assert os.fstat(file.fd).st_blocks * 512 >= 16 * ROW
    file.close()


def test_many_threads_read_and_write_records_of_their_own(tmp_path: Path) -> None:
    workers, rounds = 8, 30
    file, slab = RecordFile(tmp_path / "r.bin", workers, ROW), HostSlab("w", workers, ROW, False)

    def work(row: int) -> bool:
        numbers = random.Random(row)
        for _ in range(rounds):
            expected = bytes_of(numbers.randrange(1000))
            slab[row].copy_(expected)
            file.write(row, slab[row])
            slab[row].zero_()
            file.read(row, slab[row])
            if not torch.equal(slab[row], expected):
                return False
        return True

    with ThreadPoolExecutor(workers) as pool:
        assert all(pool.map(work, range(workers)))
    file.close()


def test_a_file_system_without_direct_io_works_and_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_file, opened = os.open, []

    def no_direct_io(path: Path, flags: int, mode: int = 0o777) -> int:
        opened.append(bool(flags & os.O_DIRECT))
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", no_direct_io)
    with caplog.at_level(logging.WARNING, "overspill"):
        file = RecordFile(tmp_path / "r.bin", 2, ROW)
    assert opened == [True, False]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{tmp_path}: no direct I/O" in caplog.text
    slab = HostSlab("w", 2, ROW, False)
    slab[0].copy_(bytes_of(1))
    file.write(1, slab[0])
    file.read(1, slab[1])
    assert torch.equal(slab[1], bytes_of(1))
    file.close()


def test_short_reads_and_writes_are_carried_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:ALIGN]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:ALIGN]], at))
    file, slab = RecordFile(tmp_path / "r.bin", 2, ROW), HostSlab("w", 2, ROW, False)
    slab[0].copy_(bytes_of(5))
    file.write(1, slab[0])
    file.read(1, slab[1])
    assert torch.equal(slab[1], bytes_of(5))
    file.close()


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    file, slab = RecordFile(tmp_path / "r.bin", 4, ROW), HostSlab("w", 1, ROW, False)
    os.ftruncate(file.fd, 3 * ROW + ALIGN)
    with pytest.raises(DiskError, match=r"r\.bin.*restart from the last checkpoint"):
        file.read(3, slab[0])
    file.close()


def test_a_write_does_not_hide_that_the_file_was_cut(tmp_path: Path) -> None:
    """A write behind the end would fill the hole before it with zeros, which read as weights."""
    file, slab = RecordFile(tmp_path / "r.bin", 4, ROW), HostSlab("w", 1, ROW, False)
    os.ftruncate(file.fd, ROW)
    with pytest.raises(DiskError, match=r"r\.bin.*restart from the last checkpoint"):
        file.write(3, slab[0])
    file.close()


def test_a_write_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file, slab = RecordFile(tmp_path / "r.bin", 2, ROW), HostSlab("w", 1, ROW, False)
    monkeypatch.setattr(os, "pwritev", no_space)
    with pytest.raises(OSError, match="No space left"):
        file.write(0, slab[0])
    monkeypatch.undo()
    file.close()


def test_closing_removes_the_file_and_can_be_done_twice(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.bin", 2, ROW)
    file.close()
    file.close()
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"cannot create .*nowhere"):
        RecordFile(tmp_path / "nowhere" / "r.bin", 2, ROW)


def test_the_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_folder(tmp_path / "a" / "b", need=1)
    assert not list((tmp_path / "a" / "b").iterdir())


def test_a_folder_with_too_little_space_names_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"free, the spilled experts need 1024\.0 TiB.* --disk"):
        check_folder(tmp_path, need=2**50)
