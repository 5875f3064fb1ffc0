"""Parsing of JSON from other programs."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The content of JSON text, which may begin with a byte order mark. Raises ValueError for any
    error, also for nesting that Python cannot follow."""
    try:
        return json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
