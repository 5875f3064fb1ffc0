"""Options that are declared once become arguments with help and checks."""

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from overspill.core.errors import ConfigError
from overspill.core.options import Count, check_options, init_takes, takes, values_of


@dataclass(frozen=True)
class Heat:
    watts: int = 5
    """How hot."""


@dataclass(frozen=True, kw_only=True)
class Kitchen(Heat):
    """A kitchen"""

    fuel: Annotated[str, ("gas", "wood")] = "gas"
    """What
    burns."""
    pots: Count | None = None


@takes(Kitchen)
def cook(meal: str, kitchen: Kitchen) -> tuple[str, Kitchen]:
    """Cooks."""
    return meal, kitchen


class Cook:
    @init_takes(Kitchen)
    def __init__(self, meal: str, kitchen: Kitchen) -> None:
        self.given = meal, kitchen


def test_options_are_arguments_of_a_function() -> None:
    for call in (cook, lambda *given, **named: Cook(*given, **named).given):
        assert call("soup", 7, fuel="wood") == ("soup", Kitchen(7, fuel="wood"))
        many = r"^(cook|Cook.__init__)\(\): too many .*give these by name: fuel, pots$"
        with pytest.raises(TypeError, match=many):
            call("soup", 7, "wood")
        with pytest.raises(TypeError, match=r"^(cook|Cook.__init__)\(\): .*'fule'$"):
            call("soup", fule="wood")
    assert cook(meal="soup")[1] == Kitchen()  # type: ignore[call-arg]
    assert list(inspect.signature(cook).parameters) == ["meal", "watts", "fuel", "pots"]
    assert cook.__doc__ == "Cooks.\n\nArgs:\n    watts: How hot.\n    fuel: What burns.\n    pots: "


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fuel": "coal"}, "fuel='coal' must be one of 'gas', 'wood'"),
        ({"pots": 0}, "pots=0 must be a whole number of at least 1"),
        ({"pots": True}, "pots=True must be a whole number"),
        ({"pots": "2"}, "pots='2' must be a whole number"),
    ],
)
def test_an_invalid_option_is_named(given: dict[str, Any], message: str) -> None:
    check_options(Kitchen(pots=2), Kitchen)
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_options(Kitchen(**given), Kitchen)
    check_options(Kitchen(**given), Heat)


def test_options_of_a_base_class_are_passed_on() -> None:
    assert values_of(Kitchen(7, fuel="wood"), Heat) == {"watts": 7}
