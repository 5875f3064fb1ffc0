"""Settings: a tree of dataclasses that flags and files fill.

A config is a frozen dataclass of sections, a section is one of options (`core.options`). Their
names are unique in the whole tree: each is also a flag (`--seq-len`), and a file may write it in a
table of its section or at the top level.
"""

import dataclasses
import difflib
import functools
import json
import math
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from overspill.core.errors import ConfigError
from overspill.core.json_text import parse_json
from overspill.core.options import SIZE, Option, Rule, field_docs, options_of
from overspill.core.sizes import parse_size

_REMOVED = frozenset({"lookahead", "pin", "resident_share"})
"""Settings in config files of earlier versions that no longer exist."""


@dataclass(frozen=True, kw_only=True)
class Setting(Option):
    """One field of the tree, with the texts of its flag."""

    help: str
    section: str
    title: str
    """The docstring of the section: the heading of its flags."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def convert(self, value: Any) -> Any:
        """`value` from a file or the command line, in the type of the field."""
        if value is None and self.optional:
            return None
        if self.kind is float and type(value) is int:
            return float(value)
        if self.check == SIZE and type(value) is int:
            return str(value)
        if self.kind is tuple and isinstance(value, list | tuple):
            if all(isinstance(item, str) for item in value):
                return tuple(value)
        elif type(value) is self.kind:
            return value
        wanted = "a list of strings" if self.kind is tuple else self.kind.__name__
        raise ConfigError(f"{self.name} = {value!r} has the wrong type; give {wanted}")

    def validate(self, value: Any) -> None:
        """Raise a ConfigError that names the flag unless `value` is valid."""
        if value is None:
            return
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{self.flag} {value} must be a finite number")
        if isinstance(self.check, Rule) and not self.check.holds(value):
            raise ConfigError(f"{self.flag} {value} must be {self.check.words}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.flag} {value} is unknown; give {' or '.join(self.choices)}")
        if self.check == SIZE:
            parse_size(value, self.flag)


@dataclass(frozen=True)
class Config:
    """Base of all configs: a frozen dataclass of sections."""

    command: ClassVar[str] = ""
    """The command of `overspill` that takes these settings."""

    def __post_init__(self) -> None:
        flat = self.flat()
        for setting in self.settings():
            setting.validate(flat[setting.name])

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        """Every setting of the tree, in its order."""
        kind: Any = cls  # mypy does not accept a type as hashable
        return _settings_of(kind)

    @classmethod
    def make(cls, *layers: Mapping[str, Any]) -> Self:
        """The config from flat settings; a later layer overrides an earlier one."""
        merged = {name: value for layer in layers for name, value in layer.items()}
        known = {setting.name: setting for setting in cls.settings()}
        sections: dict[str, dict[str, Any]] = {}
        for name, value in merged.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"see overspill {cls.command} --help"
                raise ConfigError(
                    f"unknown setting {name!r}; {f'did you mean {close[0]!r}?' if close else hint}"
                )
            section = sections.setdefault(known[name].section, {})
            section[name] = known[name].convert(value)
        hints = typing.get_type_hints(cls)
        return cls(**{name: hints[name](**values) for name, values in sections.items()})

    @classmethod
    def read_file(cls, path: Path) -> dict[str, Any]:
        """The flat settings of a .toml or .json file."""
        try:
            text = path.read_text(encoding="utf-8-sig")
            tree = tomllib.loads(text) if path.suffix == ".toml" else parse_json(text)
        except OSError as error:
            raise ConfigError(
                f"config file {path} cannot be read ({error.strerror}); check the path"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"config file {path} cannot be parsed: {error}; fix it") from error
        if not isinstance(tree, dict):
            raise ConfigError(f"config file {path} is not a table; write `name = value` lines")
        flat = cls._flatten(tree, path)
        return {name: value for name, value in flat if name not in _REMOVED}

    @classmethod
    def _flatten(cls, tree: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
        # `data` is both a section and a setting: a table is the section.
        sections = {section.name for section in dataclasses.fields(cls)}
        section_of = {setting.name: setting.section for setting in cls.settings()}
        for name, value in tree.items():
            if not isinstance(value, dict):
                yield name, value
                continue
            if name not in sections:
                raise ConfigError(
                    f"{path}: unknown section [{name}]; use one of {sorted(sections)}"
                )
            for key, inner in value.items():
                if section_of.get(key, name) != name:
                    raise ConfigError(
                        f"{path}: {key} is in [{name}]; move it to [{section_of[key]}]"
                    )
                yield key, inner

    def flat(self) -> dict[str, Any]:
        return {
            item.name: getattr(getattr(self, item.section), item.name) for item in self.settings()
        }

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


@functools.cache
def _settings_of(config: type[Any]) -> tuple[Setting, ...]:
    found = []
    for section in dataclasses.fields(config):
        kind = typing.get_type_hints(config)[section.name]
        title, helps = (kind.__doc__ or "").strip(), field_docs(kind)
        found += [
            Setting(**vars(option), help=helps[option.name], section=section.name, title=title)
            for option in options_of(kind)
        ]
    return tuple(found)
