from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from overspill.core.errors import ConfigError
from overspill.core.options import Count, NotNegative, Share, Size
from overspill.train.settings import Config


@dataclass(frozen=True)
class BaseSection:
    """The base"""

    pots: Count = 2
    """How many
    pots."""
    spices: tuple[str, ...] = ()
    """Which spices."""


@dataclass(frozen=True)
class KitchenSection(BaseSection):
    """The kitchen"""

    pots: Count = 3
    heat: NotNegative | None = None
    """How hot."""
    salt: Share = 0.5
    """How salty."""
    fuel: Literal["gas", "wood"] = "gas"
    """What burns."""
    water: Size | None = None
    """How much water."""


@dataclass(frozen=True)
class HouseConfig(Config):
    """A house."""

    command: ClassVar[str] = "cook"
    kitchen: KitchenSection = field(default_factory=KitchenSection)


def test_a_field_is_a_flag_with_its_help() -> None:
    pots, spices, heat, _, fuel, water = HouseConfig.settings()
    assert (pots.flag, pots.title, pots.help) == ("--pots", "The kitchen", "How many pots.")
    assert (pots.kind, spices.kind, heat.kind, fuel.kind, water.kind) == (
        int, tuple, float, str, str,
    )  # fmt: skip
    assert (pots.optional, heat.optional, pots.default) == (False, True, 3)


def test_settings_are_merged_converted_and_written(tmp_path: Path) -> None:
    layers = {"pots": 1, "spices": ["salt"], "water": 4096}, {"pots": 4, "heat": 7}
    house = HouseConfig.make(*layers)
    assert house == HouseConfig(KitchenSection(4, ("salt",), 7.0, water="4096"))
    assert house.flat()["spices"] == ("salt",)
    (tmp_path / "a.json").write_text(house.to_json())
    assert HouseConfig.make(HouseConfig.read_file(tmp_path / "a.json")) == house


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pot": 1}, "unknown setting 'pot'; did you mean 'pots'"),
        ({"xyzzy": 1}, "unknown setting 'xyzzy'; see overspill cook --help"),
        ({"spices": "salt"}, "spices = 'salt' has the wrong type; give a list of strings"),
        ({"spices": [1]}, r"spices = \[1\] has the wrong type; give a list"),
        ({"pots": None}, "pots = None has the wrong type; give int"),
        ({"pots": 0}, "--pots 0 must be at least 1"),
        ({"heat": -1.0}, "--heat -1.0 must be 0 or more"),
        ({"heat": float("inf")}, "--heat inf must be a finite number"),
        ({"salt": 1.5}, "--salt 1.5 must be between 0 and 1"),
        ({"fuel": "coal"}, "--fuel coal is unknown; give gas or wood"),
        ({"water": "much"}, "--water='much' is not a size"),
    ],
)
def test_an_invalid_value_names_its_flag(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HouseConfig.make(given)
