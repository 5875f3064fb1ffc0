"""Copies the output of each rank to the terminal and to a file. Imports no torch."""

import fcntl
import os
import pty
import re
import selectors
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 16
_LINES = 32
"""Lines at the bottom of a terminal that a progress bar may still draw anew."""
_CONTROL = re.compile(rb"\r|\n|\x1b\[[0-9;?]*([A-Za-z])")
_INCOMPLETE = re.compile(rb"\x1b(\[[0-9;?]*)?\Z")


class RankLogs:
    """The output of ranks on its way to the terminal and to files: `rank-3.log` of a folder.

    The files are written once `after` exists, the config of the run: a run that could not begin
    leaves no files. A run that is resumed appends to them.
    """

    def __init__(self, folder: Path, after: Path) -> None:
        self.folder, self._after = folder, after
        self._selector = selectors.DefaultSelector()
        self._files: list[_LogFile] = []
        self._writes = False

    def path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def mention(self, rank: int) -> str:
        """The end of an error that names the file of a rank, if there is one."""
        return f"; its output is in {self.path(rank)}" if self.path(rank).exists() else ""

    @contextmanager
    def streams(self, rank: int) -> Iterator[tuple[int, int]]:
        """Standard output and standard error of a rank, as descriptors for the process that the
        block starts. They are terminals where those of this process are: a progress bar stays."""
        file = _LogFile(self.path(rank))
        self._files.append(file)
        ends = []
        for target in (1, 2):
            is_terminal = os.isatty(target)
            source, end = _open_terminal(target) if is_terminal else os.pipe()
            text = _TerminalText() if is_terminal else None
            self._selector.register(source, selectors.EVENT_READ, (target, file, text))
            ends.append(end)
        try:
            yield ends[0], ends[1]
        finally:
            for end in ends:
                os.close(end)  # else the end of the rank's output would not be seen

    def copy(self, seconds: float = 0.0) -> bool:
        """Wait up to `seconds` for output and copy it; return whether there was any."""
        found = self._selector.select(seconds)
        for key, _ in found:
            target, file, text = key.data
            try:
                data = os.read(key.fd, _CHUNK)
            except OSError:  # the end of a pseudo terminal
                data = b""
            shown = memoryview(data)
            while shown:
                shown = shown[os.write(target, shown) :]
            file.add(data if text is None else text.add(data) if data else text.rest())
            if not data:
                self._selector.unregister(key.fd)
                os.close(key.fd)
        if not self._writes and self._after.exists():
            self._writes = True
            for file in self._files:
                file.open()
        return bool(found)

    def close(self) -> None:
        """Copy the rest. A process that a rank has left behind may keep its output open: what such
        a process prints later is lost."""
        while self.copy():
            pass
        for key in [*self._selector.get_map().values()]:
            _, file, text = key.data
            file.add(b"" if text is None else text.rest())
            os.close(key.fd)
        self._selector.close()
        for file in self._files:
            file.close()


class _LogFile:
    """The file of one rank. Output is kept in memory until it is opened."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, bytearray()
        self._file: BinaryIO | None = None

    def open(self) -> None:
        with self._warning():
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        self.add(b"")

    def add(self, data: bytes) -> None:
        self._waiting += data
        if self._file is not None:
            with self._warning():
                self._file.write(self._waiting)
            self._waiting.clear()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Training goes on if the disk is full."""
        try:
            yield
        except OSError as error:
            self._file = None
            text = f"warning: {self._path} cannot be written ({error.strerror}) and is not complete"
            print(text, file=sys.stderr, flush=True)


class _TerminalText:
    """Lines of a terminal as they stay there: without colours, and without earlier states of a
    progress bar, which moves the cursor up and erases its lines."""

    def __init__(self) -> None:
        self._lines, self._begun = [b""], b""

    def add(self, data: bytes) -> bytes:
        """Return lines that will not change any more."""
        data = self._begun + data
        cut = _INCOMPLETE.search(data)
        data, self._begun = (data[: cut.start()], cut[0]) if cut else (data, b"")
        at = 0
        for match in _CONTROL.finditer(data):
            self._lines[-1] += data[at : match.start()]
            at = match.end()
            if match[0] == b"\n":
                self._lines.append(b"")
            elif match[1] == b"A" and len(self._lines) > 1:  # a bar goes up by single lines
                self._lines.pop()
            elif match[1] == b"K":
                self._lines[-1] = b""
        self._lines[-1] += data[at:]
        final, self._lines = self._lines[:-_LINES], self._lines[-_LINES:]
        return b"".join(line + b"\n" for line in final)

    def rest(self) -> bytes:
        """Return the other lines; at the end."""
        lines, self._lines = self._lines, [b""]
        return b"\n".join(lines)


def _open_terminal(like: int) -> tuple[int, int]:
    """A pseudo terminal of the size of `like`; bytes pass it unchanged."""
    main, end = pty.openpty()
    attributes = termios.tcgetattr(end)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(end, termios.TCSANOW, attributes)
    fcntl.ioctl(end, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8)))
    return main, end
