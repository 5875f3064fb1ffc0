import os
import signal
from collections.abc import Mapping

import pytest

from overspill.core.errors import ConfigError
from overspill.parallel.launcher import RankPlace, launch


def test_a_process_knows_its_rank_from_its_environment() -> None:
    assert RankPlace.find({}) is None
    assert RankPlace.find({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert RankPlace.find({"RANK": "1", "WORLD_SIZE": "4"}) == RankPlace(1, 4, 1, 4)
    on_nodes = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}
    place = RankPlace.find(on_nodes)
    assert place == RankPlace(5, 6, node_rank=1, node_size=2)
    assert place.node == 2


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3"}, "equally many on all nodes"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"RANK": "first", "WORLD_SIZE": "4"}, "must be numbers"),
    ],
)
def test_unsuitable_environments_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RankPlace.find(environment)


def test_a_rank_knows_its_launcher() -> None:
    places: list[RankPlace | None] = []

    def start(environment: Mapping[str, str]) -> Ended:
        places.append(RankPlace.find(environment))
        return Ended(0)

    assert launch(2, start) == 0
    assert places == [RankPlace(rank, 2, rank, 2, launcher=os.getpid()) for rank in range(2)]


class Ended:
    """A process that has ended, or ends when it is killed."""

    def __init__(self, code: int | None) -> None:
        self._code = code

    def poll(self) -> int | None:
        return self._code

    def send_signal(self, sig: int) -> None:
        if self._code is None:
            self._code = -sig


@pytest.mark.parametrize(
    ("codes", "expected", "said"),
    [
        ((0, 0, 0), 0, ""),
        ((0, 2, 1), 2, ""),  # the rank has said why
        ((None, -9, None), 1, "error: rank 1 was killed by SIGKILL\n"),
        (
            (0, 0, None),
            1,
            "error: rank 2 has not ended 0.1 s after another one has; it may be stopped\n",
        ),
    ],
)
def test_ranks_end_together(
    codes: tuple[int | None, ...],
    expected: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("overspill.parallel.launcher._END", 0.1)
    before = signal.getsignal(signal.SIGINT)
    processes = [Ended(code) for code in codes]
    assert launch(3, lambda environment: processes[int(environment["RANK"])]) == expected
    assert capsys.readouterr().err == said
    assert all(process.poll() is not None for process in processes)
    assert signal.getsignal(signal.SIGINT) is before


class Stopped(Ended):
    """A process that handles no signal, as one that was stopped or waits for such a one."""

    def send_signal(self, sig: int) -> None:
        if sig == signal.SIGKILL:
            super().send_signal(sig)


def test_a_second_interrupt_ends_ranks_that_do_not_handle_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("overspill.parallel.launcher.GRACE", 0.1)
    processes = [Stopped(None), Stopped(None)]

    def start(environment: Mapping[str, str]) -> Stopped:
        signal.raise_signal(signal.SIGINT)
        return processes[int(environment["RANK"])]

    assert launch(2, start) == 130
    assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2
    assert capsys.readouterr().err == ""
