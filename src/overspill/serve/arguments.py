"""Checks the arguments of `LLM`."""

from collections.abc import Mapping

from overspill.core.errors import ConfigError


def check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")


def check_not_given(options: Mapping[str, object]) -> None:
    """Refuse arguments with which a model was loaded that is loaded already."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} is for a model that is loaded here; give it to overspill.load"
            )
