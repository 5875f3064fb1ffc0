"""Runs pip for the Makefile and shows one line of progress; its whole output only if it fails.

    python3 tests/pip_progress.py "PyTorch" .venv/bin/python -m pip install torch

It runs before anything is installed, so it uses the standard library only.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

_DOWNLOAD = re.compile(r"\s*(?:Downloading|Using cached) (\S+)\s*(\(.*\))?$")
_BYTES = re.compile(r"Progress (\d+) of (\d+)")
_INSTALL = re.compile(r"Installing collected packages: (.*)")
_BUILD = re.compile(r"\s*(?:Building wheel|Preparing metadata|Building editable) for (\S+)")
_BIG = re.compile(r"\((?:\d{2,}(?:\.\d+)? MB|.* GB)\)")


class Progress:
    """What pip does now: a line that is rewritten every second on a terminal; elsewhere a line at
    the start, one for each large download, and one at the end."""

    def __init__(self, what: str, out: TextIO, live: bool) -> None:
        self._what, self._out, self._live = what, out, live
        self._now = "reading the package index"
        self._share = ""
        self._began = time.monotonic()
        self._done = threading.Event()

    def read(self, line: str) -> None:
        """A line of pip's output."""
        if match := _BYTES.match(line):
            part, whole = map(int, match.groups())
            self._share = f", {part / whole:.0%}" if whole else ""
        elif match := _DOWNLOAD.match(line):
            name = "-".join(match[1].rpartition("/")[2].split("-")[:2])  # without its tags
            self._now, self._share = f"downloading {name} {match[2] or ''}".rstrip(), ""
            if not self._live and _BIG.search(line):
                self._print(self._now)
        elif match := _INSTALL.match(line):
            self._now, self._share = f"unpacking {match[1].count(',') + 1} packages", ""
        elif match := _BUILD.match(line):
            self._now, self._share = f"building {match[1]}", ""

    def tick(self) -> None:
        """Shows the time, until `end`."""
        while not self._done.wait(1.0):
            if self._live:
                text = f"{self._what}: {self._now}{self._share} ({self._seconds} s)"
                self._out.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
                self._out.flush()

    def end(self, failed: bool) -> None:
        self._done.set()
        if self._live:
            self._out.write("\r\x1b[K")
        self._print(f"{'failed' if failed else 'done'} after {self._seconds} s")

    @property
    def _seconds(self) -> int:
        return round(time.monotonic() - self._began)

    def _print(self, text: str) -> None:
        self._out.write(f"{self._what}: {text}\n")
        self._out.flush()


def run(what: str, command: Sequence[str], out: TextIO, live: bool) -> int:
    """The exit code of `command`."""
    progress = Progress(what, out, live)
    if not live:
        out.write(f"{what}: installing\n")
        out.flush()
    lines = []
    ticker = threading.Thread(target=progress.tick, daemon=True)
    ticker.start()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            progress.read(line)
            if not _BYTES.match(line):
                lines.append(line)
    progress.end(failed=process.returncode != 0)
    ticker.join()
    if process.returncode:
        out.write("".join(lines))
    return process.returncode


def main() -> int:
    what, *command = sys.argv[1:]
    # with -j several of these share the terminal
    live = sys.stdout.isatty() and "-j" not in os.environ.get("MAKEFLAGS", "")
    try:
        return run(what, command, sys.stdout, live)
    except KeyboardInterrupt:
        print(f"\n{what}: stopped; the same command continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
