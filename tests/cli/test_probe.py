import json
import logging
from pathlib import Path

import pytest
import torch

from overspill.cli.main import app
from overspill.compute.cpu_kernel import cpu_isa
from overspill.hardware.machine import usable_cores
from overspill.probe.table import lacking
from tests.probe.little import little_effort, own_cache
from tests.trace.test_picture import png_size

__all__ = ["little_effort", "own_cache"]

pytestmark = pytest.mark.usefixtures("little_effort")

TINY = ["probe", "--d-model", "16", "--d-hidden", "32", "--threads", "1"]


@pytest.mark.usefixtures("pictures")
def test_json_is_all_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "costs.png"
    assert app([*TINY, "--gated", "--dtype", "fp32", "--picture", str(picture), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["expert"]["shape"]["d_model"] == 16
    assert said["expert"]["shape"]["gated"] is True
    assert said["expert"]["dtype"] == "float32"
    assert said["expert"]["cpu_forward"]["tokens"] == [1, 4, 16]
    assert said["limits"]["host_read"] > 0
    assert said["measured"] is True
    assert json.loads(Path(said["profile"]).read_text())["limits"] == said["limits"]
    assert said["picture"] == str(picture)
    assert png_size(picture)[0] > 1500


def test_tables_are_printed_and_the_second_time_it_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app(TINY) == 0
    out = capsys.readouterr().out
    for words in ("The machine", "One expert, ms", "tokens"):
        assert words in out
    for line in lacking(usable_cores(), cpu_isa() or "none", torch.cuda.is_available()):
        assert line in out
    assert "cached" not in out
    assert app(TINY) == 0
    out = capsys.readouterr().out
    assert "cached; --again measures again" in out
    assert app([*TINY, "--again"]) == 0
    assert "cached" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_the_picture_lies_beside_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert app([*TINY, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert Path(said["picture"]).parent == Path(said["profile"]).parent
    assert png_size(Path(said["picture"]))[0] > 1500


def test_a_preset_gives_the_shape_and_flags_win(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["probe", "--preset", "nano", "--d-hidden", "64", "--threads", "1", "--json"]) == 0
    shape = json.loads(capsys.readouterr().out)["expert"]["shape"]
    assert (shape["d_model"], shape["d_hidden"], shape["gated"]) == (128, 64, True)


def test_nothing_but_json_reaches_the_output_when_a_profile_is_damaged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "overspill")
    assert app([*TINY, "--json"]) == 0
    profile = Path(json.loads(capsys.readouterr().out)["profile"])
    profile.write_text("{")
    assert app([*TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] is True
    assert "cannot be read" in caplog.text


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["probe", "--help"]) == 0
    assert "overspill probe --preset w1 --picture" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--d-model", "-4"], "--d-model -4 must be at least 1"),
        (["--d-hidden", "0"], "--d-hidden 0 must be at least 1"),
        (["--d-model", "wide"], "Invalid value for '--d-model'"),
        (["--dtype", "fp8"], "--dtype fp8 is unknown; give"),
        (["--preset", "nanoo"], "preset 'nanoo' is not one of"),
        (["--threads", "0"], "--threads 0 must be at least 1"),
        (["--picture", "FILE/costs.png"], "cannot be written"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    flags = [flag.replace("FILE", str(tmp_path / "file")) for flag in flags]
    assert app([*TINY, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
