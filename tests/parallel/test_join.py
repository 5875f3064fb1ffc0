"""Processes that were started as ranks join each other and end together."""

import os
import socket
from pathlib import Path

from overspill.parallel.join import joined
from overspill.parallel.launcher import RankPlace
from tests.fork_server import fork_server


def _rank(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = RankPlace.find()
    assert place == RankPlace(rank, 2, node_rank=rank, node_size=2)
    with joined(place, "cpu") as others:
        assert others.ranks.gather(rank) == [0, 1]
        if rank == 1:
            raise ZeroDivisionError("an exception in one rank")
        others.ranks.gather(rank)


def test_an_exception_in_one_rank_ends_all_and_is_named_first(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server, logs = fork_server(), [tmp_path / str(rank) for rank in range(2)]
    ranks = [server.start(_rank, rank, port, log=log) for rank, log in enumerate(logs)]
    assert [server.wait(process) for process in ranks] == [1, 1]
    assert "error" not in logs[0].read_text()
    first, *others = logs[1].read_text().splitlines()
    assert first == "error: rank 1: ZeroDivisionError: an exception in one rank"
    assert "error" not in " ".join(others)  # the traceback alone
    assert others[-1].startswith("ZeroDivisionError")
