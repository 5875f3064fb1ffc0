from dataclasses import dataclass, field
from pathlib import Path

import pytest

from overspill.core.errors import ConfigError
from overspill.train.settings import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    SHARE,
    check,
    make,
    read_file,
    settings_of,
    to_flat,
    to_json,
)


@dataclass(frozen=True)
class Kitchen:
    """The kitchen"""

    pots: int = 2
    """How many
    pots."""
    spices: tuple[str, ...] = ()
    """Which spices."""
    heat: float | None = None
    """How hot."""


@dataclass(frozen=True)
class House:
    """A house."""

    kitchen: Kitchen = field(default_factory=Kitchen)


def test_a_field_is_a_flag_with_its_help() -> None:
    pots, spices, heat = settings_of(House)
    assert (pots.flag, pots.title, pots.help) == ("--pots", "The kitchen", "How many pots.")
    assert (pots.kind, spices.kind, heat.kind) == (int, tuple, float)
    assert (pots.optional, heat.optional, pots.default) == (False, True, 2)


def test_settings_are_merged_cast_and_written(tmp_path: Path) -> None:
    house = make(House, [{"pots": 1, "spices": ["salt"]}, {"pots": 3, "heat": 7}], "cook")
    assert house == House(Kitchen(3, ("salt",), 7.0))
    assert to_flat(house) == {"pots": 3, "spices": ("salt",), "heat": 7.0}
    (tmp_path / "a.json").write_text(to_json(house))
    assert make(House, [read_file(House, tmp_path / "a.json")], "cook") == house


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pot": 1}, "there is no setting 'pot'; did you mean 'pots'"),
        ({"xyzzy": 1}, "there is no setting 'xyzzy'; see overspill cook --help"),
        ({"spices": "salt"}, "spices = 'salt' is not of the right kind; give a list"),
        ({"spices": [1]}, r"spices = \[1\] is not of the right kind; give a list"),
        ({"pots": None}, "pots = None is not of the right kind; give a int"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(House, [given], "cook")


@pytest.mark.parametrize(
    ("kitchen", "message"),
    [
        (Kitchen(pots=0), "--pots 0 must be at least 1"),
        (Kitchen(heat=-1.0), "--heat -1.0 must be 0 or more"),
        (Kitchen(heat=1.5), "--heat 1.5 must be between 0 and 1"),
        (Kitchen(heat=float("inf")), "--heat inf must be a finite number"),
    ],
)
def test_rules_name_the_flag(kitchen: Kitchen, message: str) -> None:
    rules = {AT_LEAST_1: ["pots"], NOT_NEGATIVE: ["heat"], SHARE: ["heat"]}
    with pytest.raises(ConfigError, match=message):
        check(House(kitchen), rules, {})
    check(House(), rules, {})  # what was left out breaks no rule


def test_choices_name_what_there_is() -> None:
    with pytest.raises(ConfigError, match="--pots 2 is not known; give 4 or 5"):
        check(House(), {}, {"pots": ("4", "5")})
