"""Starts one process for each rank, on this machine, and ends them all together.

Imports no torch: the processes import it at the same time as they start.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from overspill.core.errors import ConfigError
from overspill.parallel.rank_logs import RankLogs

GRACE = 5.0
"""Seconds in which ranks may end by themselves after one has failed, or after a second signal."""
_END = 50.0
"""Seconds in which ranks may end after one has ended its work: they wait for each other before, and
then release their memory, which may take some time."""
_POLL = 0.05
_LAUNCHER = "OVERSPILL_LAUNCHER"
"""Tells a rank the process id of `launch`."""


@dataclass(frozen=True)
class RankPlace:
    """The rank of a process, from the environment that `launch` or torchrun has set."""

    rank: int
    size: int
    node_rank: int
    """The number of the rank among those of its node."""
    node_size: int
    """The number of ranks of each node."""
    launcher: int | None = None
    """The process of `launch`; None under torchrun."""

    @property
    def node(self) -> int:
        return self.rank // self.node_size

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> "RankPlace | None":
        """Return None in a process that trains alone."""
        try:
            size = int(environment.get("WORLD_SIZE", 1))
            rank = int(environment.get("RANK", 0))
            node_size = int(environment.get("LOCAL_WORLD_SIZE", size))
            launcher = int(environment[_LAUNCHER]) if _LAUNCHER in environment else None
        except ValueError as error:
            raise ConfigError(f"RANK and WORLD_SIZE must be numbers ({error})") from error
        if size == 1:
            return None
        if not 0 <= rank < size:
            raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={size}")
        if node_size < 1 or size % node_size:
            raise ConfigError(
                f"{node_size} of {size} ranks are on this node; start equally many on all nodes"
            )
        return cls(rank, size, rank % node_size, node_size, launcher)


class Process(Protocol):
    """The part of `subprocess.Popen` that is used."""

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...


Start = Callable[[Mapping[str, str]], Process]


def rank_command(arguments: Sequence[str], logs: RankLogs) -> Start:
    """Start `overspill` with these arguments, in a session of its own: Ctrl-C in the terminal
    reaches only the launcher, which passes it on once."""
    line = [sys.executable, "-m", "overspill", *arguments]

    def start(environment: Mapping[str, str]) -> Process:
        with logs.streams(int(environment["RANK"])) as (output, errors):
            return subprocess.Popen(
                line,
                env={**os.environ, **environment},
                start_new_session=True,
                stdout=output,
                stderr=errors,
            )

    return start


def launch(size: int, start: Start, logs: RankLogs | None = None) -> int:
    """Start `size` ranks and wait for them; return the exit code of the first that failed. SIGINT
    and SIGTERM are passed on to all ranks. None of them outlives this call. Meanwhile `logs` copies
    their output."""
    ranks: list[Process] = []
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in ranks:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        port = _free_port()
        for rank in range(size):
            ranks.append(start(_environment(rank, size, port)))
        code = _wait(ranks, received, logs.copy if logs else time.sleep)
        codes = [process.poll() for process in ranks]
        if code == 0 and None in codes:
            stuck = f"rank {codes.index(None)} has not ended {_END:g} s after another one has"
            seen = logs.mention(codes.index(None)) if logs else ""
            print(f"error: {stuck}; it may be stopped{seen}", file=sys.stderr, flush=True)
            return 1
        if code < 0 and received:
            return 130  # it could not handle the signal
        if code < 0:  # it could not say so itself
            rank = next(n for n, process in enumerate(ranks) if process.poll() == code)
            name = signal.Signals(-code).name
            seen = logs.mention(rank) if logs else ""
            print(f"error: rank {rank} was killed by {name}{seen}", file=sys.stderr, flush=True)
        return max(code, 1) if code else 0
    finally:
        _kill(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(
    ranks: Sequence[Process], received: Sequence[int], idle: Callable[[float], object]
) -> int:
    """The exit code of the first rank that fails, when the others have ended or had time to; 0 if
    none does. If one is killed, the others cannot go on, and are not waited for. A rank that waits
    for a stopped one handles no signal: after the second one they have limited time too, and after
    one has ended."""
    failed, deadline = 0, math.inf
    while True:
        codes = [process.poll() for process in ranks]
        if not failed and any(codes):
            failed = next(code for code in codes if code)
        if failed or len(received) > 1:
            deadline = min(deadline, time.monotonic() + GRACE)
        elif 0 in codes:
            deadline = min(deadline, time.monotonic() + _END)
        if failed < 0 or None not in codes:
            return failed
        if time.monotonic() > deadline:
            return failed or (-received[-1] if received else 0)
        idle(_POLL)


def _kill(ranks: Sequence[Process]) -> None:
    for process in ranks:
        process.send_signal(signal.SIGKILL)  # no-op if it has ended
    while any(process.poll() is None for process in ranks):
        time.sleep(_POLL)


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "GLOO_SOCKET_IFNAME": "lo",  # else the address of the host name
        "OMP_NUM_THREADS": str(max(1, cores // size)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else every rank warns of connections that one has closed
    }
    return {
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        _LAUNCHER: str(os.getpid()),
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
