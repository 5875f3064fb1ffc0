import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from overspill.core.errors import ConfigError
from overspill.tiers.aside import folder_aside, remove, temporary_folder, write_failure
from tests.full_disk import largest_file


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with folder_aside(target) as aside:
        (aside / "sub").mkdir()
        (aside / "sub" / "file").write_text("content")
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "content"
    assert list(target.parent.iterdir()) == [target]


def test_an_empty_folder_is_replaced_and_a_full_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with folder_aside(tmp_path / "empty") as aside:
        (aside / "file").touch()
    with (
        pytest.raises(OSError, match="not empty"),
        folder_aside(tmp_path / "empty") as aside,
    ):
        (aside / "other").touch()
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_nothing_is_left(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with folder_aside(tmp_path / "out") as aside:
            (aside / "file").touch()
            raise error

    with pytest.raises(error):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_leftover_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".tmp-out"
    left.mkdir()
    (left / "half").touch()
    with folder_aside(tmp_path / "out") as aside:
        (aside / "file").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_current_folder_can_be_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with folder_aside(Path(".")) as aside:
        (aside / "file").touch()
    assert (tmp_path / "here" / "file").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_temporary_folder_starts_empty_and_is_removed(tmp_path: Path) -> None:
    (tmp_path / "deep" / "aside").mkdir(parents=True)
    (tmp_path / "deep" / "aside" / "leftover").touch()
    with temporary_folder(tmp_path / "deep" / "aside") as aside:
        assert not list(aside.iterdir())
        (aside / "file").touch()
    assert not aside.exists()


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path) -> None:
    """Else one would give its name to what the other has not finished."""
    with folder_aside(tmp_path / "out") as aside:
        (aside / "file").touch()
        with (
            pytest.raises(ConfigError, match=r"\.tmp-out is being written by another process"),
            folder_aside(tmp_path / "out"),
        ):
            pass
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_another_process_makes_after_the_rename_stays(tmp_path: Path) -> None:
    path = tmp_path / "aside"
    with temporary_folder(path):
        path.rename(tmp_path / "out")
        path.mkdir()
        (path / "of another process").touch()
    assert [file.name for file in path.iterdir()] == ["of another process"]


def test_a_link_stays_one_and_its_folder_gets_the_content(tmp_path: Path) -> None:
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    for name in ("empty", "new"):
        link = tmp_path / name
        link.symlink_to(tmp_path / "disk" / name)
        with folder_aside(link) as aside:
            assert aside.parent == tmp_path / "disk"
            (aside / "file").touch()
        assert link.is_symlink()
        assert [path.name for path in link.iterdir()] == ["file"]


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    remove(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_why_a_file_was_not_written_is_found_in_errors_of_libraries_too(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(1000)}
    with largest_file(100), pytest.raises(SafetensorError) as refused:
        save_file(tensors, tmp_path / "file")
    assert write_failure(refused.value) == "File too large"
    assert write_failure(OSError(errno.ENOSPC, "No space left on device")) == (
        "No space left on device"
    )
    assert write_failure(ValueError("os error")) is None
