"""Options: fields of frozen dataclasses, each declared once.

The string below a field is its help; its type says which values are valid (`Count`, `Share`, a
`Literal`, or `Annotated[str, ("a", "b")]`). The arguments of the Python interface, the flags of
commands and the settings of config files are made from these classes. Imports no torch.
"""

import ast
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar

from overspill.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    Device = str | torch.device
    DType = str | torch.dtype
else:  # a flag has a string
    Device = DType = str

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """A condition on numbers, and its description for error messages."""

    words: str
    holds: Callable[[float], bool]

    def __repr__(self) -> str:
        return repr(self.words)


_NOT_NEGATIVE = Rule("0 or more", lambda value: value >= 0)
SIZE = "size"
Count = Annotated[int, Rule("at least 1", lambda value: value >= 1)]
NotNegativeInt = Annotated[int, _NOT_NEGATIVE]
NotNegative = Annotated[float, _NOT_NEGATIVE]
Share = Annotated[float, Rule("between 0 and 1", lambda value: 0 <= value <= 1)]
Size = Annotated[str | int, SIZE]
"""Bytes: a number, or a text such as 12GiB."""


@dataclass(frozen=True)
class Option:
    """One field of a dataclass, as flags and checks need it."""

    name: str
    default: Any
    kind: type[Any]
    """bool, int, float, str, or tuple for several strings."""
    optional: bool
    check: Rule | str | None = None
    """A rule for numbers, or `SIZE`."""
    choices: tuple[str, ...] = ()


@functools.cache
def options_of(cls: Any) -> tuple[Option, ...]:
    """The fields of a dataclass, inherited ones first."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(
        Option(item.name, item.default, *_read_type(hints[item.name])) for item in fields(cls)
    )


def check_options(options: Any, cls: Any) -> None:
    """Raises a ConfigError unless the values of the fields of `cls` are valid."""
    for option in options_of(cls):
        value, words = getattr(options, option.name), None
        if value is None and option.optional:
            continue
        if option.choices and value not in option.choices:
            words = f"one of {', '.join(map(repr, option.choices))}"
        rule = option.check if option.kind is int else None
        if isinstance(rule, Rule) and (type(value) is not int or not rule.holds(value)):
            words = f"a whole number of {rule.words}"
        if words is not None:
            raise ConfigError(f"{option.name}={value!r} must be {words}")


def values_of(options: Any, cls: Any) -> dict[str, Any]:
    """The fields of a base class of `options` and their values."""
    return {item.name: getattr(options, item.name) for item in fields(cls)}


def takes(
    make: Callable[P, T],
) -> Callable[[Callable[[S, T], R]], Callable[Concatenate[S, P], R]]:
    """Decorator that replaces the last parameter of a function, an object with options, by the
    options themselves as arguments; their help becomes a part of its docstring."""
    return lambda function: _with_options(function, make)


def init_takes(
    make: Callable[P, T],
) -> Callable[[Callable[[S, Any, T], None]], Callable[Concatenate[S, Any, P], None]]:
    """`takes` for `__init__`, which has `self` as an additional parameter."""
    return lambda function: _with_options(function, make)


def _with_options(function: Callable[..., Any], cls: Any) -> Callable[..., Any]:
    *first, _ = inspect.signature(function).parameters.values()
    taken = [*inspect.signature(cls).parameters.values()]
    signature = inspect.Signature([*first, *taken])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            named = ", ".join(each.name for each in taken if each.kind is each.KEYWORD_ONLY)
            fix = f"; give these by name: {named}" if "too many positional" in str(error) else ""
            raise TypeError(f"{function.__qualname__}(): {error}{fix}") from None
        others = [given.pop(each.name) for each in first]
        return function(*others, cls(**given))

    docs = field_docs(cls)
    helps = (f"    {each.name}: {docs.get(each.name, '')}" for each in taken)
    call.__doc__ = "\n".join((inspect.cleandoc(function.__doc__ or ""), "", "Args:", *helps))
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _read_type(hint: Any) -> tuple[type[Any], bool, Rule | str | None, tuple[str, ...]]:
    """The plain type of a field, whether it may be None, its check and its choices."""
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Annotated:
        kind, check = typing.get_args(hint)
        if isinstance(check, tuple):
            return str, optional, None, check
        return str if check == SIZE else kind, optional, check, ()
    if typing.get_origin(hint) is Literal:
        return str, optional, None, typing.get_args(hint)
    return typing.get_origin(hint) or hint, optional, None, ()


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The string below each field of a dataclass, which Python itself discards. A field that a
    subclass repeats without a string keeps the one of the base class."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, after in zip(body.body, body.body[1:], strict=False):
            match item, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    docs[name] = " ".join(text.split())
    return docs
