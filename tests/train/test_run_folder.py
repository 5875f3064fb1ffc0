from pathlib import Path

import pytest

from overspill.core.errors import ConfigError, DiskError
from overspill.train.config import TrainConfig
from overspill.train.run_folder import RunFolder, choose_folder, find_run


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
