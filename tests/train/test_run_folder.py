import errno
import os
from pathlib import Path

import pytest

from overspill.core.errors import ConfigError, DiskError
from overspill.train.config import TrainConfig
from overspill.train.run_folder import RunFolder, choose_folder, find_run
from overspill.train.trained import find_checkpoint
from tests.full_disk import largest_file


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_without_a_name_are_numbered() -> None:
    for expected in ("runs/nano", "runs/nano-2", "runs/nano-3"):
        with choose_folder(TrainConfig.make({})) as folder:
            assert str(folder.path) == expected
    assert str(find_run(None, "nano").path) == "runs/nano-3"


def test_resuming_what_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no run of w1 in runs/"):
        find_run(None, "w1")
    with pytest.raises(ConfigError, match="--resume: folder nowhere does not exist"):
        choose_folder(TrainConfig.make({"resume": True, "out": "nowhere"}))


def test_the_config_is_kept_as_a_resumed_run_needs_it() -> None:
    config = TrainConfig.make({"steps": 7, "resume": True})
    with RunFolder(Path("a")) as folder:
        folder.write_config(config)
    kept = TrainConfig.make(TrainConfig.read_file(Path("a/config.json")))
    assert (kept.run.steps, kept.run.out, kept.run.resume) == (7, "a", False)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DiskError, match="--out file/run cannot be written"),
        RunFolder(Path("file/run")),
    ):
        pass


def test_the_lock_is_gone_with_its_run() -> None:
    for _ in range(2):
        with (
            RunFolder(Path("a")),
            pytest.raises(ConfigError, match="in use by another process"),
            RunFolder(Path("a")),
        ):
            pass


class Failed(Exception):
    """Something else that ends a run before it has begun."""


def fail_in(folder: Path) -> None:
    with RunFolder(folder):
        raise Failed


@pytest.mark.parametrize("kind", ["a link to it", "the root of a disk"])
def test_an_error_before_the_run_is_told_where_its_folder_cannot_be_removed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    out = Path("out")
    out.mkdir()
    if kind == "a link to it":
        out = Path("link")
        out.symlink_to("out", target_is_directory=True)
    else:
        monkeypatch.setattr(Path, "rmdir", busy)
    for _ in range(2):  # the lock is gone
        with pytest.raises(Failed):
            fail_in(out)
        assert list(out.iterdir()) == []


@pytest.mark.parametrize("name", ["run", "run/checkpoints"])
def test_a_link_to_a_folder_that_is_not_there_is_named(name: str) -> None:
    """With --resume too: without its checkpoints a run would start at the first step."""
    link = Path(name)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("gone", target_is_directory=True)
    message = f"{name} is a link to gone, which does not exist; mount its disk"
    with pytest.raises(DiskError, match=message), RunFolder(Path("run")):
        pass
    if name == "run/checkpoints":
        Path("run/config.json").write_text("{}")
        with pytest.raises(DiskError, match=message):  # as it is exported, or used
            find_checkpoint(Path("run"))


def test_checkpoints_that_cannot_be_written_are_told_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("run/checkpoints").mkdir(parents=True)
    access = os.access

    def refuse(path: Path, mode: int) -> bool:  # as of another user: root may write everywhere
        return Path(path).name != "checkpoints" and access(path, mode)

    monkeypatch.setattr(os, "access", refuse)
    message = r"--out run cannot be written \(no files can be created in run/checkpoints\)"
    with pytest.raises(DiskError, match=message), RunFolder(Path("run")):
        pass


def test_a_config_that_does_not_fit_on_the_disk_leaves_nothing() -> None:
    with (
        pytest.raises(DiskError, match=r"--out run cannot be written \(File too large\)"),
        RunFolder(Path("run")) as folder,
        largest_file(10),
    ):
        folder.write_config(TrainConfig.make({}))
    assert not Path("run").exists()
