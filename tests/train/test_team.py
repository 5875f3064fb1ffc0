import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.errors import ConfigError
from overspill.parallel.join import Joined
from overspill.train.team import Team


def team_of(size: int) -> list[Team]:
    """The same team, as each of its ranks sees it."""
    nothing: Any = None
    ranks: list[Any] = [
        SimpleNamespace(
            rank=rank,
            size=size,
            on_machine=size,
            n_stages=1,
            replicas=None,
            node=SimpleNamespace(rank=rank, size=size),
        )
        for rank in range(size)
    ]
    return [Team(Joined(nothing, each, nothing)) for each in ranks]


@given(st.integers(1, 20), st.integers(1, 6))
def test_each_item_counts_on_one_rank_and_each_rank_has_some(count: int, size: int) -> None:
    items = list(range(count))
    parts = [team.own(items) for team in team_of(size)]
    assert [item for part, counted in parts for item in part[:counted]] == items
    assert all(part for part, _ in parts)  # all run the model


def test_sequences_of_each_micro_batch_are_divided_in_order() -> None:
    batch_BS = torch.arange(24).view(12, 2)
    parts = [team.own_sequences(batch_BS, pieces=2) for team in team_of(3)]
    for piece, whole in enumerate(batch_BS.chunk(2)):
        assert torch.equal(torch.cat([part.chunk(2)[piece] for part in parts]), whole)
    assert torch.equal(Team().own_sequences(batch_BS, pieces=2), batch_BS)


def test_a_batch_that_ranks_do_not_divide_is_refused() -> None:
    Team().check_batch(7)
    with pytest.raises(ConfigError, match="--batch 7 must be a multiple of the 2 ranks"):
        team_of(2)[0].check_batch(7)


def test_only_other_ranks_draw_numbers_of_their_own() -> None:
    first, second, third = team_of(3)
    torch.manual_seed(1)
    kept = torch.get_rng_state()
    first.seed_step(0, 5)
    assert torch.equal(torch.get_rng_state(), kept)
    drawn = []
    for team, step in ((second, 5), (third, 5), (second, 6), (second, 5)):
        team.seed_step(0, step)
        drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 3
    assert drawn[0] == drawn[3]


def test_ranks_along_stages_have_the_same_part_of_a_batch() -> None:
    """Two nodes, each with two ranks along stages by three along experts."""
    nothing: Any = None
    teams = []
    for node, stage, expert in itertools.product(range(2), range(2), range(3)):
        ranks: Any = SimpleNamespace(
            rank=6 * node + 3 * stage + expert,
            size=12,
            on_machine=6,
            n_stages=2,
            replicas=SimpleNamespace(rank=node, size=2),
            node=SimpleNamespace(rank=expert, size=3),
        )
        teams.append(Team(Joined(nothing, ranks, nothing)))
    assert [team.part for team in teams] == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert {team.parts for team in teams} == {6}
    assert [team.own(range(12))[0][0] for team in teams[:3]] == [0, 2, 4]
