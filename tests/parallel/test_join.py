"""Processes that were started as ranks join each other and end together."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from overspill.core.errors import ConfigError, RankError
from overspill.parallel import join, watchdog
from overspill.parallel.join import joined
from overspill.parallel.launcher import RankPlace
from tests.fork_server import fork_server
from tests.ports import free_port


def _rank(rank: int, port: int, failure: type[BaseException], together: bool) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = RankPlace.find()
    assert place == RankPlace(rank, 2, node_rank=rank, node_size=2)
    with joined(place, "cpu") as others:
        assert others.ranks.gather(rank) == [0, 1]
        with others.ranks.together("work") if together else nullcontext():
            if rank == 1:
                raise failure("an exception in one rank")
        others.ranks.gather(rank)


def _end(
    folder: Path, failure: type[BaseException], together: bool = False
) -> tuple[list[int], list[str]]:
    """Exit codes and output of two ranks, of which the second fails."""
    port = free_port()
    server, logs = fork_server(), [folder / str(rank) for rank in range(2)]
    ranks = [
        server.start(_rank, rank, port, failure, together, log=log) for rank, log in enumerate(logs)
    ]
    return [server.wait(process) for process in ranks], [log.read_text() for log in logs]


@pytest.mark.parametrize("told", [False, True])
def test_an_exception_in_one_rank_ends_all_and_is_named_first(tmp_path: Path, told: bool) -> None:
    """By that rank, with its traceback, also if the others were told of it."""
    codes, texts = _end(tmp_path, ZeroDivisionError, told)
    assert codes == [1, 1]
    assert "error" not in texts[0]
    first, *others = texts[1].splitlines()
    assert first == "error: rank 1: ZeroDivisionError: an exception in one rank"
    assert "error" not in " ".join(others)  # the traceback alone
    assert others[-1].startswith("ZeroDivisionError")


def test_ranks_that_are_interrupted_report_no_failure(tmp_path: Path) -> None:
    codes, texts = _end(tmp_path, KeyboardInterrupt)
    assert codes == [130, 130]
    assert texts == ["", ""]


def _start_alone(rank: int, port: int) -> None:
    """One of two ranks; the other does not start."""
    join.LATE = watchdog.LATE = 1  # type: ignore[attr-defined]
    join.LAUNCHER_FIRST = 0.2
    try:
        _rank(rank, port, ZeroDivisionError, False)
    except RankError as error:
        print(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_start_is_named(tmp_path: Path, rank: int) -> None:
    server, log = fork_server(), tmp_path / "log"
    server.wait(server.start(_start_alone, 1 - rank, free_port(), log=log))
    (line,) = log.read_text().splitlines()
    assert line.removeprefix("error: ").startswith(f"rank {rank} has")
    assert "not started within 1 s" in line


def _without_address() -> None:
    os.environ.pop("MASTER_ADDR", None)
    try:
        with joined(RankPlace(0, 2, 0, 2), "cpu"):
            pass
    except ConfigError as error:
        print(error)


def test_ranks_without_an_address_are_refused(tmp_path: Path) -> None:
    """A process of its own: a rank ends with its parent."""
    server, log = fork_server(), tmp_path / "log"
    assert server.wait(server.start(_without_address, log=log)) == 0
    assert "RANK=0 and WORLD_SIZE=2 are set, but not MASTER_ADDR" in log.read_text()


def _orphan() -> None:
    with joined(RankPlace(0, 2, 0, 2, launcher=os.getpid()), "cpu"):  # not its parent
        pass


def test_a_rank_ends_if_its_launcher_was_killed_before_it_has_joined(tmp_path: Path) -> None:
    server = fork_server()
    assert server.wait(server.start(_orphan, log=tmp_path / "log")) == -signal.SIGKILL
