"""What is known is read; what is not, or not trusted, is measured and kept."""

import dataclasses
import os
import tempfile
from pathlib import Path

import pytest
import torch

from overspill.core.experts import ExpertShape
from overspill.hardware import native
from overspill.hardware.profile import profile_file, read_profile, this_machine, write_profile
from overspill.probe import known as module
from overspill.probe import known_costs
from overspill.probe.known import Known

pytestmark = pytest.mark.usefixtures("little_effort")

CPU = torch.device("cpu")
SHAPE = ExpertShape(16, 32, gated=False)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each time that an expert is measured."""
    times: list[object] = []
    measure = module.measure_expert

    def counted(*args: object) -> object:
        times.append(args)
        return measure(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "measure_expert", counted)
    return times


def _costs(**changes: object) -> object:
    chosen = {"shape": SHAPE, "dtype": torch.bfloat16, "device": CPU, "threads": 1, **changes}
    return known_costs(**chosen)  # type: ignore[arg-type]


def test_costs_are_measured_once(measured: list[object]) -> None:
    first = _costs()
    assert _costs() == first
    assert len(measured) == 1
    _costs(dtype=torch.float32)
    _costs(threads=2)
    _costs(shape=ExpertShape(16, 48, gated=False))
    assert len(measured) == 4
    assert _costs() == first
    assert len(measured) == 4


@pytest.mark.parametrize("field", ["machine", pytest.param("version", marks=pytest.mark.slow)])
def test_those_of_another_machine_or_version_are_measured_again(
    field: str, measured: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    _costs()
    file = profile_file(this_machine("cpu"))
    other = dataclasses.replace(read_profile(file, this_machine("cpu")), **{field: "another"})
    write_profile(other, file)
    _costs()
    assert len(measured) == 2
    assert "is of another and is ignored" in caplog.text
    assert read_profile(file, this_machine("cpu")).costs(SHAPE, "bfloat16", 1) is not None


def test_a_damaged_profile_is_measured_again(
    measured: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    first = _costs()
    file = profile_file(this_machine("cpu"))
    file.write_text(file.read_text()[:-30])
    _costs()
    assert len(measured) == 2
    assert "cannot be read" in caplog.text
    assert first is not None


def test_a_profile_that_cannot_be_written_is_said_not_to_be_kept(
    measured: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    file = profile_file(this_machine("cpu"))
    file.mkdir()  # root may write anywhere, but not over a folder
    (file / "full").touch()
    assert _costs() is not None
    assert len(measured) == 1
    assert "cannot be written" in caplog.text


def test_a_profile_that_is_lost_at_exit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "home").touch()
    (tmp_path / f"overspill-cache-{os.getuid()}").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    native.cache_folder.cache_clear()
    assert _costs() is not None
    assert "the profile is lost at exit" in caplog.text


def test_limits_are_measured_once() -> None:
    first = Known(CPU, 1).limits()
    again = Known(CPU, 1)
    assert again.limits() == first
    assert not again.measured
    assert Known(CPU, 2).limits().cores == 2


def test_again_measures_anew_and_keeps_that(measured: list[object]) -> None:
    _costs()
    anew = Known(CPU, 1, again=True)
    costs = anew.costs(SHAPE, torch.bfloat16)
    assert anew.measured
    assert len(measured) == 2
    assert _costs() == costs
