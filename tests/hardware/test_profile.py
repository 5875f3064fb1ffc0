"""A profile: its curves, its file, and which files are not trusted."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.experts import ExpertShape
from overspill.hardware import profile as module
from overspill.hardware.machine import Gpu
from overspill.hardware.profile import (
    Curve,
    ExpertCosts,
    MachineProfile,
    Profile,
    profile_file,
    read_profile,
    this_machine,
    this_version,
    write_profile,
)

SHAPE = ExpertShape(8, 16, gated=True)
CURVE = Curve((1, 4, 16), (0.1, 0.2, 0.5))


def some_costs(shape: ExpertShape = SHAPE, threads: int = 2) -> ExpertCosts:
    return ExpertCosts(
        shape=shape,
        dtype="bfloat16",
        threads=threads,
        load=0.3,
        load_beside=0.4,
        cpu_forward=CURVE,
        cpu_backward=CURVE,
        cpu_training=CURVE,
        cpu_beside=1.5,
        gpu_forward=CURVE,
        gpu_backward=CURVE,
        gpu_training=CURVE,
        round_trip=1e-4,
    )


def some_limits() -> MachineProfile:
    return MachineProfile(
        cores=2,
        kernel="avx512",
        link=1e9,
        host_read=1e10,
    )


def some_profile() -> Profile:
    return Profile(this_machine(), this_version(), some_limits(), (some_costs(),))


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_profile(some_profile(), tmp_path / "deep" / "profile.json")
    assert read_profile(path) == some_profile()
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_without_a_file_nothing_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_profile(tmp_path / "none.json") == Profile(this_machine(), this_version())
    assert not caplog.records


@pytest.mark.parametrize("field", ["machine", "version"])
def test_the_profile_of_another_machine_or_version_is_not_trusted(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = dataclasses.replace(some_profile(), **{field: "quite another"})
    path = write_profile(other, tmp_path / "profile.json")
    assert read_profile(path) == Profile(this_machine(), this_version())
    assert "is of quite another and is ignored" in caplog.text


def test_a_profile_of_an_older_format_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = json.loads(json.dumps(dataclasses.asdict(some_profile())))
    data["version"] = data["version"].replace("format 4", "format 2")
    del data["experts"][0]["cpu_training"], data["experts"][0]["gpu_training"]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    assert read_profile(path) == Profile(this_machine(), this_version())
    assert "format 2 and is ignored" in caplog.text


def _damage(data: dict[str, Any], *keys: str | int, value: object) -> str:
    part: Any = data
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return json.dumps(data)


DAMAGES: list[tuple[tuple[str | int, ...], object]] = [
    (("experts", 0, "load"), "fast"),
    (("experts", 0, "load"), float("nan")),
    (("experts", 0, "load"), -1.0),
    (("experts", 0, "load"), None),
    (("experts", 0, "threads"), 0),
    (("experts", 0, "cpu_forward"), 3.0),
    (("experts", 0, "cpu_forward", "seconds"), [0.1]),
    (("experts", 0, "cpu_forward", "seconds"), [0.1, "x", 0.3]),
    (("experts", 0, "cpu_forward", "tokens"), [4, 1, 16]),
    (("experts", 0, "shape", "gated"), 7),
    (("experts", 0, "shape", "wings"), 2),
    (("experts", 0), ["not", "costs"]),
    (("experts",), 5),
    (("limits", "host_read"), 0),
    (("limits", "kernel"), 4),
    (("limits", "link"), "quick"),
    (("limits",), "none"),
]


@pytest.mark.parametrize(("keys", "value"), DAMAGES)
def test_a_damaged_profile_is_not_trusted(
    keys: tuple[str | int, ...], value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(
        _damage(json.loads(json.dumps(dataclasses.asdict(some_profile()))), *keys, value=value)
    )
    assert read_profile(path) == Profile(this_machine(), this_version())
    assert "cannot be read" in caplog.text
    assert "is ignored" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"machine": "x"}', "\ud800"])
def test_a_file_that_is_no_profile_is_not_trusted(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert read_profile(path) == Profile(this_machine(), this_version())
    assert "cannot be read" in caplog.text


def test_costs_are_known_by_shape_dtype_and_threads() -> None:
    profile = some_profile()
    assert profile.costs(SHAPE, "bfloat16", 2) == some_costs()
    assert profile.costs(SHAPE, "float32", 2) is None
    assert profile.costs(SHAPE, "bfloat16", 3) is None
    assert profile.costs(dataclasses.replace(SHAPE, d_model=9), "bfloat16", 2) is None


def test_new_costs_take_the_place_of_the_old_and_of_no_other() -> None:
    other = some_costs(threads=5)
    newer = dataclasses.replace(some_costs(), load=9.0)
    profile = some_profile().with_costs(other).with_costs(newer)
    assert profile.experts == (other, newer)


def test_a_machine_whose_gpu_is_not_used_is_another_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "gpu", lambda: Gpu("A card", 80 << 30))
    assert this_machine("cpu") != this_machine("cuda")
    assert profile_file(this_machine("cpu")) != profile_file(this_machine("cuda"))


curves = st.lists(st.integers(1, 5000), min_size=1, max_size=8, unique=True).flatmap(
    lambda tokens: st.lists(st.floats(0, 10), min_size=len(tokens), max_size=len(tokens)).map(
        lambda seconds: Curve(tuple(sorted(tokens)), tuple(sorted(seconds)))
    )
)


@given(curves)
def test_a_curve_goes_through_its_points(curve: Curve) -> None:
    for tokens, seconds in zip(curve.tokens, curve.seconds, strict=True):
        assert curve(tokens) == pytest.approx(seconds)


@given(curves, st.integers(0, 10_000), st.integers(0, 10_000))
def test_more_tokens_never_take_less_time(curve: Curve, one: int, other: int) -> None:
    few, many = sorted((one, other))
    assert curve(few) <= curve(many) + 1e-9


@given(curves, st.integers(1, 10_000))
def test_between_two_points_lies_a_straight_line(curve: Curve, tokens: int) -> None:
    inner = [n for n in range(len(curve.tokens) - 1) if curve.tokens[n] <= tokens]
    if not inner or tokens < curve.tokens[0]:
        assert curve(tokens) == curve.seconds[0]
        return
    left = inner[-1]
    t0, t1 = curve.tokens[left : left + 2]
    s0, s1 = curve.seconds[left : left + 2]
    assert curve(tokens) == pytest.approx(s0 + (s1 - s0) * (tokens - t0) / (t1 - t0), abs=1e-9)


def test_no_tokens_take_no_time() -> None:
    assert CURVE(0) == 0.0


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((0, 1), (1.0, 1.0)), ((1,), (-1.0,))],
)
def test_a_curve_that_is_none_is_refused(
    tokens: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match=r"token|times"):
        Curve(tokens, seconds)


def test_a_profile_that_cannot_be_opened_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "overspill")
    assert read_profile(tmp_path).limits is None  # a folder
    assert "cannot be read" in caplog.text
