"""The text of models on a terminal."""

import sys
from typing import TextIO

_CONTROLS = dict.fromkeys((*range(32), *range(0x7F, 0xA0)), "\N{REPLACEMENT CHARACTER}")
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]
_CONTROLS[ord("\r")] = ""  # of \r\n; alone it would hide the line before it


def is_terminal(stream: TextIO | None) -> bool:
    """None is a stream that was closed before Python started."""
    return stream is not None and stream.isatty()


def show(text: str) -> None:
    """Prints a part of an answer. A terminal gets no control characters: a model could change its
    title, or what it shows."""
    print(text.translate(_CONTROLS) if is_terminal(sys.stdout) else text, end="", flush=True)
