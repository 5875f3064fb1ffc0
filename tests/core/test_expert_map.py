"""Global expert ids and local positions map to each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.expert_map import ExpertMap


@st.composite
def maps(draw: st.DrawFn) -> tuple[int, set[int], ExpertMap]:
    n_global = draw(st.integers(1, 20))
    ids = draw(st.sets(st.integers(0, n_global - 1), min_size=1))
    listed = draw(st.permutations(sorted(ids)))
    return n_global, ids, ExpertMap.of(n_global, listed)


@given(maps())
def test_positions_are_the_local_ids_in_ascending_order(
    case: tuple[int, set[int], ExpertMap],
) -> None:
    n_global, ids, experts = case
    assert experts.n_local == len(ids)
    assert [experts.global_id(position) for position in range(experts.n_local)] == sorted(ids)
    for position in range(experts.n_local):
        assert experts.position(experts.global_id(position)) == position
    assert experts.is_whole == (len(ids) == n_global)


@given(maps())
def test_an_expert_of_another_process_has_no_position(
    case: tuple[int, set[int], ExpertMap],
) -> None:
    n_global, ids, experts = case
    for missing in set(range(n_global)) - ids:
        with pytest.raises(KeyError, match=f"expert {missing} "):
            experts.position(missing)


def test_with_one_process_ids_and_positions_are_the_same() -> None:
    experts = ExpertMap.whole(5)
    assert experts == ExpertMap.of(5, range(5))
    assert experts.is_whole
    assert [experts.position(id) for id in range(5)] == list(range(5))


@given(st.integers(1, 20), st.data())
def test_parts_are_consecutive_and_their_sizes_differ_by_one_at_most(
    n_experts: int, data: st.DataObject
) -> None:
    n_ranks = data.draw(st.integers(1, n_experts))
    parts = [ExpertMap.part(n_experts, rank, n_ranks) for rank in range(n_ranks)]
    assert [id for part in parts for id in part.local_ids] == list(range(n_experts))
    sizes = [part.n_local for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ids", [[0, 0], [5], [-1]])
def test_ids_must_be_distinct_and_in_range(ids: list[int]) -> None:
    with pytest.raises(AssertionError, match="expert"):
        ExpertMap.of(5, ids)
