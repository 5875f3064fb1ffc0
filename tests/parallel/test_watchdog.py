"""The watchdog names the rank that is killed, stopped or stuck, and no other."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from overspill.parallel.ranks import Ranks
from overspill.parallel.watchdog import APART, LATE, SILENT, STUCK, Page, Watchdog

SIZE = 3


class Team:
    """Watchdogs of three ranks in one process."""

    def __init__(self) -> None:
        self.page, self.moved = Page.create(SIZE), 0
        self.ranks: list[Any] = [SimpleNamespace(calls=0) for _ in range(SIZE)]
        self.cpu_time = 0
        self.watchdogs = [
            Watchdog(self.page, rank, cpu_time=lambda pid: self.cpu_time) for rank in range(SIZE)
        ]
        for watchdog, ranks in zip(self.watchdogs, self.ranks, strict=True):
            watchdog.follow(ranks, lambda: self.moved)

    def look(self, ticks: int, ranks: tuple[int, ...] = (0, 1, 2)) -> set[str]:
        """What the watchdogs of these ranks find wrong."""
        found = [self.watchdogs[rank].look() for _ in range(ticks) for rank in ranks]
        return {wrong for wrong in found if wrong is not None}


def test_running_ranks_are_left_alone() -> None:
    team = Team()
    assert not team.look(2 * STUCK)  # long phases
    with team.watchdogs[0].steps(), team.watchdogs[1].steps():
        assert not team.look(2 * STUCK)  # rank 2 is in a long phase
        with team.watchdogs[2].steps():
            for _ in range(2 * STUCK):
                team.ranks[1].calls += 1
                assert not team.look(1)
            for _ in range(2 * STUCK):
                team.moved += 1  # a layer with many experts on disk
                assert not team.look(1)


def test_a_stopped_rank_is_named() -> None:
    team = Team()
    team.look(3)
    assert not team.look(SILENT - 1, ranks=(0, 2))
    assert team.look(1, ranks=(0, 2)) == {"rank 1 has not responded for 20 s; it may be stopped"}


def test_a_rank_in_a_long_call_is_not_taken_for_a_stopped_one() -> None:
    """It holds the interpreter's lock, so its watchdog does not run; but it computes."""
    team = Team()
    team.look(3)
    for _ in range(2 * SILENT):
        team.cpu_time += 1
        assert not team.look(1, ranks=(0, 2))
    assert team.look(SILENT, ranks=(0, 2)) == {
        "rank 1 has not responded for 20 s; it may be stopped"
    }


def test_ranks_that_were_all_stopped_go_on() -> None:
    team = Team()
    team.look(3)
    team.look(SILENT - 1, ranks=(0,))
    assert not team.look(SILENT)


def test_a_killed_rank_is_named_and_one_that_is_done_is_not() -> None:
    page = Page.create(2)
    first, second = Watchdog(page, 0, cpu_time=lambda pid: None), Watchdog(page, 1)
    assert first.look() == "rank 1 ended unexpectedly; it may have been killed"
    second.stop()
    assert first.look() is None


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((1, 4, 3), "no progress of rank 1 for 45 s"),  # the others wait, with odd numbers
        ((1, 3, 3), "no progress of the ranks, which wait for others, for 45 s"),
    ],
)
def test_a_stuck_rank_is_named(calls: tuple[int, int, int], message: str) -> None:
    team = Team()
    team.look(STUCK)
    with team.watchdogs[0].steps(), team.watchdogs[1].steps(), team.watchdogs[2].steps():
        for ranks, count in zip(team.ranks, calls, strict=True):
            ranks.calls = count
        assert not team.look(STUCK)
        assert team.look(1) == {message}


def test_a_rank_that_does_not_start_is_named() -> None:
    watchdog = Watchdog(Page.create(2), 0)
    assert [watchdog.look() for _ in range(LATE - 1)] == [None] * (LATE - 1)
    assert watchdog.look() == "rank 1 has not started within 40 s"


def test_a_node_that_waits_for_another_one_may_wait_longer() -> None:
    watchdog, ranks = Watchdog(Page.create(1), 0, size=2), SimpleNamespace(calls=1)
    watchdog.follow(cast(Ranks, ranks))
    with watchdog.steps():
        found = [watchdog.look() for _ in range(APART + 1)]
        assert found == [None] * APART + [
            "no progress of the ranks, which wait for others, for 600 s"
        ]
        ranks.calls = 2  # it does not wait
        found = [watchdog.look() for _ in range(STUCK + 1)]
        assert found == [None] * STUCK + ["no progress of rank 0 for 45 s"]


def test_ranks_of_another_node_are_named_by_their_global_numbers() -> None:
    watchdog = Watchdog(Page.create(2), 0, first=4)
    assert [watchdog.look() for _ in range(LATE)][-1] == "rank 5 has not started within 40 s"


def test_only_the_first_failure_is_claimed() -> None:
    page = Page.create(2)
    other = Page.open(page.path, 2)
    assert not other.claimed
    assert page.claim(2)
    assert not page.claim(1)
    assert not other.claim(1)
    assert (page.exit_code, other.exit_code) == (2, 2), "all ranks end with the same code"
