"""The text of models on a terminal, and the results of commands that write files."""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

_CONTROLS = dict.fromkeys((*range(32), *range(0x7F, 0xA0)), "\N{REPLACEMENT CHARACTER}")
del _CONTROLS[ord("\n")], _CONTROLS[ord("\t")]
_CONTROLS[ord("\r")] = ""  # of \r\n; alone it would hide the line before it
_Done = TypeVar("_Done")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether `stream` is a terminal. It is None if it was closed before Python started."""
    return stream is not None and stream.isatty()


def show(text: str) -> None:
    """Print a part of an answer. A terminal gets no control characters: a model could change its
    title or contents."""
    print(text.translate(_CONTROLS) if is_terminal(sys.stdout) else text, end="", flush=True)


def report(write: Callable[[Any], _Done], as_json: bool, describe: Callable[[_Done], str]) -> None:
    """Call `write` with a progress bar, and print the dataclass that it returns."""
    from overspill.models.progress_bar import TerminalProgress

    bar = TerminalProgress()
    try:
        done = write(bar)
    finally:
        bar.stop()
    print(json.dumps(dataclasses.asdict(done)) if as_json else describe(done))  # type: ignore[call-overload]
