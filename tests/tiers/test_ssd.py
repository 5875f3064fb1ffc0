"""Record files: many threads read back what they wrote; failures are clear errors."""

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
from overspill.tiers.ssd import BounceBuffers, DirectFile, RecordFile, check_folder

SLOT = 2 * ALIGN


def bytes_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (SLOT,), dtype=torch.uint8, generator=generator)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    file, slab = RecordFile(tmp_path / "r.bin", 4, SLOT), HostSlab("w", 4, SLOT, False)
    assert os.fstat(file.fd).st_size == file.nbytes == 4 * SLOT
    for slot in (2, 0, 3, 1):
        slab[0].copy_(bytes_of(slot))
        file.write(slot, slab[0])
    for slot in range(4):
        file.read(slot, slab[1])
        assert torch.equal(slab[1], bytes_of(slot))
    file.close()


def test_records_may_have_sizes_of_their_own(tmp_path: Path) -> None:
    sizes = [SLOT, ALIGN, SLOT, ALIGN]
    file, slab = RecordFile(tmp_path / "r.bin", 4, SLOT, sizes), HostSlab("w", 2, SLOT, False)
    assert os.fstat(file.fd).st_size == file.nbytes == sum(sizes)
    for slot in (2, 0, 3, 1):
        slab[0].copy_(bytes_of(slot))
        file.write(slot, slab[0][: sizes[slot]])
    for slot, size in enumerate(sizes):
        file.read(slot, slab[1][:size])
        assert torch.equal(slab[1][:size], bytes_of(slot)[:size])
    file.close()


def test_the_space_is_reserved_before_the_first_write(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.bin", 16, SLOT)
    assert os.fstat(file.fd).st_blocks * 512 >= 16 * SLOT
    file.close()


def test_threads_read_and_write_their_own_records(tmp_path: Path) -> None:
    workers, rounds = 8, 30
    file, slab = RecordFile(tmp_path / "r.bin", workers, SLOT), HostSlab("w", workers, SLOT, False)

    def work(slot: int) -> bool:
        numbers = random.Random(slot)
        for _ in range(rounds):
            expected = bytes_of(numbers.randrange(1000))
            slab[slot].copy_(expected)
            file.write(slot, slab[slot])
            slab[slot].zero_()
            file.read(slot, slab[slot])
            if not torch.equal(slab[slot], expected):
                return False
        return True

    with ThreadPoolExecutor(workers) as pool:
        assert all(pool.map(work, range(workers)))
    file.close()


def test_missing_direct_io_is_logged_once_and_records_still_work(
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
        file = RecordFile(tmp_path / "r.bin", 2, SLOT)
    assert opened == [True, False]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{tmp_path}: no direct I/O" in caplog.text
    slab = HostSlab("w", 2, SLOT, False)
    slab[0].copy_(bytes_of(1))
    file.write(1, slab[0])
    file.read(1, slab[1])
    assert torch.equal(slab[1], bytes_of(1))
    file.close()


def test_short_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:ALIGN]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:ALIGN]], at))
    file, slab = RecordFile(tmp_path / "r.bin", 2, SLOT), HostSlab("w", 2, SLOT, False)
    slab[0].copy_(bytes_of(5))
    file.write(1, slab[0])
    file.read(1, slab[1])
    assert torch.equal(slab[1], bytes_of(5))
    file.close()


def test_reading_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    file, slab = RecordFile(tmp_path / "r.bin", 4, SLOT), HostSlab("w", 1, SLOT, False)
    os.ftruncate(file.fd, 3 * SLOT + ALIGN)
    with pytest.raises(DiskError, match=r"r\.bin.*restart from the last checkpoint"):
        file.read(3, slab[0])
    file.close()


def test_writing_to_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    """A write past the end would fill the gap with zeros, which would be read as weights."""
    file, slab = RecordFile(tmp_path / "r.bin", 4, SLOT), HostSlab("w", 1, SLOT, False)
    os.ftruncate(file.fd, SLOT)
    with pytest.raises(DiskError, match=r"r\.bin.*restart from the last checkpoint"):
        file.write(3, slab[0])
    file.close()


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EIO, "check")],
)
def test_a_failed_read_or_write_names_the_folder_and_the_way_out(
    code: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    file, slab = RecordFile(tmp_path / "r.bin", 2, SLOT), HostSlab("w", 1, SLOT, False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        patch.setattr(os, "preadv", fail)
        message = rf"{tmp_path}.*8\.0 KiB.*\({os.strerror(code)}\); {advice}.* --disk"
        with pytest.raises(DiskError, match=message):
            file.write(0, slab[0])
        with pytest.raises(DiskError, match=message):
            file.read(0, slab[0])
    file.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_without_fallocate_records_work_and_the_missing_reservation_is_logged(
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def unsupported(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with caplog.at_level(logging.WARNING, "overspill"):
        file, slab = RecordFile(tmp_path / "r.bin", 4, SLOT), HostSlab("w", 2, SLOT, False)
    assert f"{tmp_path}: this file system cannot reserve space; keep 32.0 KiB free" in caplog.text
    assert os.fstat(file.fd).st_size == file.nbytes
    slab[0].copy_(bytes_of(3))
    file.write(3, slab[0])
    file.read(3, slab[1])
    assert torch.equal(slab[1], bytes_of(3))
    file.close()


def test_a_full_disk_is_found_when_the_space_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=rf"{tmp_path}/r\.bin: reserving 32\.0 KiB .*No space left"):
        RecordFile(tmp_path / "r.bin", 4, SLOT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["a link", "a file"])
def test_a_record_file_never_opens_what_is_there(kind: str, tmp_path: Path) -> None:
    precious, name = tmp_path / "precious", tmp_path / "r.bin"
    precious.write_text("keep")
    if kind == "a link":
        name.symlink_to(precious)
    else:
        precious = name
        precious.write_text("keep")
    with pytest.raises(DiskError, match=r"cannot create .*r\.bin \(File exists\)"):
        RecordFile(name, 2, SLOT)
    assert precious.read_text() == "keep"


def test_closing_removes_the_file_and_can_be_done_twice(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.bin", 2, SLOT)
    file.close()
    file.close()
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"cannot create .*nowhere"):
        RecordFile(tmp_path / "nowhere" / "r.bin", 2, SLOT)


def test_the_folder_is_created_and_left_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        check_folder(tmp_path / "spill", need=1)
    assert not list((tmp_path / "spill").iterdir())
    assert caplog.messages == [f"created the folder {tmp_path / 'spill'} for experts on disk"]


def test_the_folder_of_a_disk_that_is_not_mounted_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"nvme does not exist; create it, or mount the SSD there"):
        check_folder(tmp_path / "nvme" / "spill", need=1)
    assert not list(tmp_path.iterdir())


def test_a_relative_folder_is_created_in_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_folder(Path("spill"), need=1)
    assert (tmp_path / "spill").is_dir()


def test_the_probe_of_a_folder_follows_no_link(tmp_path: Path) -> None:
    """Other users of a shared folder can guess a name that is made of the process id."""
    precious, folder = tmp_path / "precious", tmp_path / "shared"
    folder.mkdir()
    precious.write_text("keep")
    (folder / f".probe-{os.getpid()}").symlink_to(precious)
    check_folder(folder, need=1)
    assert precious.read_text() == "keep"
    assert [path.name for path in folder.iterdir()] == [f".probe-{os.getpid()}"]


def test_direct_files_share_the_buffer_of_a_thread(tmp_path: Path) -> None:
    bounce, data = BounceBuffers(ALIGN), bytes(range(256)) * 64
    for number in range(50):
        path = tmp_path / str(number)
        path.write_bytes(data)
        file = DirectFile.open(path, bounce)
        if file is None:
            pytest.skip("no direct I/O on this file system")
        before, out, done = bounce.buffer, bytearray(10_000), 0
        while done < len(out):
            done += file.read(memoryview(out)[done:], 5 + done)
        assert out == data[5 : 5 + len(out)]
        assert bounce.buffer is before
        file.close()


def test_a_folder_with_too_little_space_names_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"free, the spilled experts need 1024\.0 TiB.* --disk"):
        check_folder(tmp_path, need=2**50)
