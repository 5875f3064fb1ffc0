"""Temporary replacement of attributes of modules."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_MISSING = object()


@contextmanager
def replaced_attributes(replacements: Iterable[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Context in which modules have these values instead of their attributes, or hiding attributes
    of their class. Afterwards they have their attributes again."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module, name, value in replacements:
            attributes = vars(module)
            before.append((attributes, name, attributes.get(name, _MISSING)))
            attributes[name] = value
        yield
    finally:
        for attributes, name, value in before:
            if value is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = value
