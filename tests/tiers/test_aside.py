from pathlib import Path

import pytest

from overspill.tiers.aside import folder_aside, temporary_folder


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
