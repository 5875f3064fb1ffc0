"""Memory sizes such as "12GiB", "1.5 GB" and 4096."""

import math
import re
import reprlib

from overspill.core.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}


def parse_size(size: str | int | float, name: str = "size") -> int:
    """Bytes of `size`; `name` is the argument or flag for the error message."""
    if isinstance(size, int | float):
        exact: int | float = size
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"{name}={size!r} is not a size; write it like 12GiB, 800MB or 4096")
        exact = float(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= exact < math.inf:
        raise ConfigError(f"{name}={reprlib.repr(size)} must be more than zero and finite")
    return int(exact)


def format_size(size: int | float, up: bool = False) -> str:
    """`size` in the unit that makes it a number from 1 to 1024; `up` rounds up, for a minimum."""
    value = float(size)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    if units[0] == "B":
        return f"{value:.0f} B"
    return f"{math.ceil(value * 10) / 10 if up else value:.1f} {units[0]}"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
