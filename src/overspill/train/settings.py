"""The machinery of settings: a tree of dataclasses that flags and files fill.

A config is a frozen dataclass of sections, a section one of fields. The text under a field is its
help on the command line. Field names are unique over the whole tree, so each is also a flag
(`--seq-len`), and a file may write them under their section or not.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from overspill.core.errors import ConfigError
from overspill.core.sizes import parse_size


class Config(Protocol):
    """A dataclass of sections."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Setting:
    """One field of the tree, as a flag needs it."""

    name: str
    section: str
    title: str
    """The section's own docstring, the heading of its flags."""
    kind: type[Any]
    """bool, int, float, str, or tuple for several strings."""
    optional: bool
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


@functools.cache
def settings_of(config: type[Any]) -> tuple[Setting, ...]:
    """Every setting of the tree, in its order."""
    found = []
    for section in dataclasses.fields(config):
        section_type = typing.get_type_hints(config)[section.name]
        helps, hints = _field_docs(section_type), typing.get_type_hints(section_type)
        title = (section_type.__doc__ or section.name).strip()
        for item in dataclasses.fields(section_type):
            hint = hints[item.name]
            optional = isinstance(hint, types.UnionType)
            kind = typing.get_args(hint)[0] if optional else typing.get_origin(hint) or hint
            found.append(
                Setting(
                    item.name, section.name, title, kind, optional, item.default, helps[item.name]
                )
            )
    return tuple(found)


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """The string under each field of a dataclass, which Python itself throws away."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for item, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            assert isinstance(after, ast.Expr), f"{item.target.id} has no help"
            assert isinstance(after.value, ast.Constant)
            docs[item.target.id] = " ".join(str(after.value.value).split())
    return docs


def make(config: type[C], layers: Sequence[Mapping[str, Any]], command: str) -> C:
    """The config from flat settings; a later layer wins over an earlier one. `command` is the one
    whose --help an error names."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    sections: dict[str, dict[str, Any]] = {}
    known = {setting.name: setting for setting in settings_of(config)}
    for name, value in merged.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"see overspill {command} --help"
            raise ConfigError(f"there is no setting {name!r}; {hint}")
        setting = known[name]
        sections.setdefault(setting.section, {})[name] = _cast(setting, value)
    hints = typing.get_type_hints(config)
    return config(**{name: hints[name](**values) for name, values in sections.items()})


def _cast(setting: Setting, value: Any) -> Any:
    if value is None and setting.optional:
        return None
    if setting.kind is float and type(value) is int:
        return float(value)
    if setting.kind is str and type(value) is int and setting.name.endswith("_memory"):
        return str(value)  # a plain number of bytes
    if setting.kind is tuple:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{setting.name} = {value!r} is not of the right kind; give a list")
    if type(value) is not setting.kind:
        raise ConfigError(
            f"{setting.name} = {value!r} is not of the right kind; give a {setting.kind.__name__}"
        )
    return value


def read_file(config: type[Any], path: Path) -> dict[str, Any]:
    """The flat settings of a .toml or .json file."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(
            f"config file {path} cannot be read ({error.strerror}); check the path"
        ) from error
    except ValueError as error:
        raise ConfigError(f"config file {path} cannot be parsed: {error}; correct it") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path} is a list or a value; write `name = value` lines")
    return dict(_flatten(config, tree, path))


def _flatten(config: Any, tree: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    # `data` is both a section and a setting: a table is the section.
    sections = {section.name for section in dataclasses.fields(config)}
    section_of = {setting.name: setting.section for setting in settings_of(config)}
    for name, value in tree.items():
        if not isinstance(value, dict):
            yield name, value
            continue
        if name not in sections:
            raise ConfigError(f"{path}: there is no section [{name}]; there are {sorted(sections)}")
        for key, inner in value.items():
            if section_of.get(key, name) != name:
                raise ConfigError(f"{path}: {key} is in [{name}]; move it to [{section_of[key]}]")
            yield key, inner


def to_flat(config: Config) -> dict[str, Any]:
    kind: Any = type(config)  # as Any: mypy takes no type for hashable
    return {
        item.name: getattr(getattr(config, item.section), item.name) for item in settings_of(kind)
    }


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


AT_LEAST_1, NOT_NEGATIVE, SHARE = "at least 1", "0 or more", "between 0 and 1"
_RULES: dict[str, Callable[[float], bool]] = {
    AT_LEAST_1: lambda value: value >= 1,
    NOT_NEGATIVE: lambda value: value >= 0,
    SHARE: lambda value: 0 <= value <= 1,
}


def check(
    config: Config, rules: Mapping[str, Sequence[str]], choices: Mapping[str, Sequence[str]]
) -> None:
    """Values that cannot be right, each named as the flag it is: numbers must be finite and follow
    their rule, words must be one of the choices, memory must be a size."""
    flat = {name: value for name, value in to_flat(config).items() if value is not None}
    for name, value in flat.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{_flag(name)} {value} must be a finite number")
    for rule, names in rules.items():
        for name in names:
            if name in flat and not _RULES[rule](flat[name]):
                raise ConfigError(f"{_flag(name)} {flat[name]} must be {rule}")
    for name, values in choices.items():
        if name in flat and flat[name] not in values:
            raise ConfigError(
                f"{_flag(name)} {flat[name]} is not known; give {' or '.join(values)}"
            )
    for name in ("gpu_memory", "host_memory"):
        if name in flat:
            parse_size(flat[name], _flag(name))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
