"""Ends a rank when another one is killed, stopped or stuck.

Without it a rank could wait for another one forever. A thread in each rank publishes that it runs,
the number of calls to other ranks by its main thread, and the bytes of experts that have moved. It
looks at the numbers of the other ranks of its node. If another node fails, its connections close.
"""

import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Self

from overspill.parallel.ranks import Ranks

_TICK = 1.0
"""Seconds between two looks."""
SILENT = 20
"""Ticks after which a rank that does not publish anything counts as stopped."""
LATE = 40
"""Ticks, or seconds, after which a rank that has not joined the others counts as failed."""
STUCK = 45
"""Ticks after which ranks count as stuck, if none has called others or moved an expert."""
APART = 600
"""Ticks after which ranks of a node count as stuck if all wait for another node, whose progress
they do not see."""


class State(IntEnum):
    """The state of a rank."""

    ANYTHING = 0
    """Work that may take long without a call to other ranks: loading, saving, compiling."""
    STEPS = 1
    """Training: it makes calls in every layer."""
    DONE = 2
    """Done: it needs no other rank."""


class Words(NamedTuple):
    """The numbers that a rank publishes."""

    pid: int
    """The process id; 0 before anything was published."""
    ticks: int
    calls: int
    """Calls to other ranks; odd while it waits for them."""
    moved: int
    """Bytes of experts that were moved."""
    state: int


class Page:
    """Memory that all ranks of a node map: numbers of 64 bits, each written by one rank. It has no
    name, and the system frees it however they end."""

    _WORDS = len(Words._fields)

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._fd = fd
        self._words = memoryview(mmap.mmap(fd, 8 * (1 + size * self._WORDS))).cast("q")

    @classmethod
    def create(cls, size: int) -> Self:
        fd = os.memfd_create("overspill-ranks")
        os.ftruncate(fd, 8 * (1 + size * cls._WORDS))
        return cls(fd, size)

    @property
    def path(self) -> str:
        """The path at which other processes of this user can open it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @classmethod
    def open(cls, path: str, size: int) -> Self:
        return cls(os.open(path, os.O_RDWR), size)

    def publish(self, rank: int, words: "Words") -> None:
        at = 1 + rank * self._WORDS
        for number, value in enumerate(words):
            self._words[at + number] = value

    def read(self, rank: int) -> "Words":
        at = 1 + rank * self._WORDS
        return Words(*self._words[at : at + self._WORDS].tolist())

    @property
    def claimed(self) -> bool:
        """Whether a failure was reported."""
        return self._words[0] != 0

    @property
    def exit_code(self) -> int:
        """The exit code of the first failure, with which all ranks end. Any of them may be the
        first."""
        return self._words[0]

    def claim(self, exit_code: int) -> bool:
        """Whether this is the first call in all ranks: only the first failure is reported, the
        others follow from it. The code is not 0."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            first = not self.claimed
            if first:
                self._words[0] = exit_code
            return first
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


class Watchdog:
    """Publishes the state of this rank, and watches the others."""

    def __init__(
        self,
        page: Page,
        rank: int,
        cpu_time: Callable[[int], int | None] | None = None,
        first: int = 0,
        size: int | None = None,
    ) -> None:
        """`rank` is counted from `first`, the first rank of the node; there are `size` ranks on all
        nodes. `cpu_time` is that of a process, None if it has ended."""
        self._page, self._rank, self._cpu_time = page, rank, cpu_time or _cpu_time
        self._first, self._has_nodes = first, size not in (None, page.size)
        self._ticks = 0
        self._state = State.ANYTHING
        self._followed: list[Ranks] = []
        self._moved: Callable[[], int] = lambda: 0
        self._last: dict[tuple[int, str], tuple[object, int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._publish()

    def follow(self, ranks: Ranks, moved: Callable[[], int] | None = None) -> None:
        """Let the calls of `ranks`, and growing numbers of `moved`, count as progress from now
        on."""
        self._followed.append(ranks)
        self._moved = moved or self._moved

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Training: if no rank makes progress, all end."""
        before, self._state = self._state, State.STEPS
        try:
            yield
        finally:
            self._state = before

    def start(self, end: Callable[[str], None]) -> None:
        """Begin to watch, in a thread; `end` gets the description of a failure."""
        self._thread = threading.Thread(target=self._run, args=(end,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """This rank ends, and looks no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._state = State.DONE
        self._publish()

    def _run(self, end: Callable[[str], None]) -> None:
        while not self._stop.wait(_TICK):
            wrong = self.look()
            if wrong is not None:
                end(wrong)
                return

    def look(self) -> str | None:
        """One tick: publishes this rank's numbers; returns the failure of another rank."""
        self._ticks += 1
        self._publish()
        # Counted in own ticks: all ranks may have been stopped for a while, and continued.
        found: list[Words] = []
        unchanged: list[int] = []
        for rank in range(self._page.size):
            words, name = self._page.read(rank), f"rank {self._first + rank}"
            if words.pid == 0 and self._ticks >= LATE:
                return f"{name} has not started within {LATE} s"
            if words.pid != 0 and words.state != State.DONE and rank != self._rank:
                used = self._cpu_time(words.pid)
                if used is None:
                    return f"{name} ended unexpectedly; it may have been killed"
                # a long call may keep its watchdog from running, but uses the processor
                if self._unchanged((rank, "ticks"), (words.ticks, used)) >= SILENT:
                    return f"{name} has not responded for {SILENT} s; it may be stopped"
            found.append(words)
            progress = words.calls, words.moved, words.state
            unchanged.append(self._unchanged((rank, "progress"), progress))
        if all(words.state == State.STEPS for words in found):
            return self._stuck(found, min(unchanged))
        return None

    def _stuck(self, found: Sequence[Words], ticks: int) -> str | None:
        """The failure of ranks in steps if none has made progress for some time."""
        guilty = [
            str(self._first + rank) for rank, words in enumerate(found) if not words.calls % 2
        ]
        limit = APART if self._has_nodes and not guilty else STUCK
        if ticks < limit:
            return None
        who = f"rank {', '.join(guilty)}" if guilty else "the ranks, which wait for others,"
        return f"no progress of {who} for {limit} s"

    def _publish(self) -> None:
        calls = sum(ranks.calls for ranks in self._followed)
        words = Words(os.getpid(), self._ticks, calls, self._moved(), self._state)
        self._page.publish(self._rank, words)

    def _unchanged(self, what: tuple[int, str], value: object) -> int:
        """The number of ticks for which a published value has not changed."""
        last, since = self._last.get(what, (None, 0))
        if last != value:
            self._last[what] = value, self._ticks
            return 0
        return self._ticks - since


def _cpu_time(pid: int) -> int | None:
    """The processor time of a process; None if it has ended, or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *numbers = text.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(numbers[10]) + int(numbers[11])


def report(page: Page, line: str, exit_code: int) -> bool:
    """Print the line unless a failure was reported already; return whether it did."""
    first = page.claim(exit_code)
    if first:
        print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return first
