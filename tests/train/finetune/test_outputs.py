import errno
from pathlib import Path

import pytest

from overspill.core.errors import DiskError
from overspill.train.finetune.outputs import Outputs, Write


def _model(text: str) -> Write:
    return lambda folder: (folder / "model").write_text(text) and None


def _read(folder: Path) -> str:
    return (folder / "model").read_text()


def test_a_last_model_that_is_the_best_is_written_once(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    outputs.save_best(_model("4"))
    outputs.save_best(_model("8"))
    assert _read(outputs.best) == "8"
    outputs.save_final(_model("12"), is_best=True)
    assert outputs.best.is_symlink()
    assert _read(outputs.best) == _read(outputs.final) == "12"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "final"]


def test_a_best_model_outlives_the_final_that_it_was(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    outputs.save_final(_model("12"), is_best=True)
    outputs.reopen()
    assert not outputs.best.is_symlink()
    outputs.save_final(_model("20"), is_best=False)
    assert (_read(outputs.best), _read(outputs.final)) == ("12", "20")


def test_what_was_there_stays_when_the_disk_is_full(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "model").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    outputs = Outputs(tmp_path)
    outputs.save_best(_model("4"))
    with pytest.raises(DiskError, match=r"best cannot be written \(No space left on device\)"):
        outputs.save_best(fail)
    assert _read(outputs.best) == "4"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_library_that_finds_the_disk_full_is_told_as_well(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # as of the tokenizers library

    with pytest.raises(DiskError, match=r"final cannot be written \(No space left on device\)"):
        Outputs(tmp_path).save_final(fail, is_best=False)

    def other(folder: Path) -> None:
        raise ValueError("of another kind")

    with pytest.raises(ValueError, match="of another kind"):
        Outputs(tmp_path).save_final(other, is_best=False)


def test_what_a_killed_run_left_is_put_in_order(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path)
    (tmp_path / ".new-best").mkdir()  # complete, and killed before it got its name
    (tmp_path / ".new-best" / "model").write_text("8")
    (tmp_path / ".old-best").mkdir()
    outputs.reopen()
    assert _read(outputs.best) == "8"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
