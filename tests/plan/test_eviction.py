"""Caches of experts: what is kept, what a policy may cost, and how near it is to the optimum."""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.eviction import Belady, hit_rates, retained
from overspill.plan.eviction import LFU, LRU, Ids, NextUse, Policy
from tests.simulate.recordings import TRACE, needs_recordings

ONLINE: list[Callable[[int, int], Policy]] = [LRU, LFU, NextUse]


def random_trace(seed: int, n_tokens: int, n_layers: int, n_experts: int, top_k: int) -> Ids:
    """Distinct experts per token, some of them more popular."""
    generator = np.random.default_rng(seed)
    noise = generator.gumbel(size=(n_tokens, n_layers, n_experts))
    return (noise - 0.3 * np.arange(n_experts)).argsort(axis=-1)[..., -top_k:]


def naive_lru(trace_TN: Ids, room: int) -> float:
    """The hit rate of a layer."""
    used: dict[int, int] = {}
    hits = 0
    for time, experts in enumerate(trace_TN.tolist()):
        hits += sum(expert in used for expert in experts)
        used |= dict.fromkeys(experts, time)
        while len(used) > room:
            del used[min(used, key=lambda expert: (used[expert], expert))]
    return hits / trace_TN.size


def most_hits(trace_TN: Ids, room: int, optional: bool) -> float:
    """The highest hit rate of a layer among all choices of what to keep."""
    best = {frozenset[int](): 0}
    for experts in trace_TN.tolist():
        after: dict[frozenset[int], int] = {}
        for cached, hits in best.items():
            found, needed = cached | set(experts), frozenset(experts)
            for size in range(min(room, len(found)) + 1):
                for kept in map(frozenset, combinations(sorted(found), size)):
                    if optional or needed <= kept:
                        score = hits + len(cached & needed)
                        after[kept] = max(after.get(kept, 0), score)
        best = after
    return max(best.values()) / trace_TN.size


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_lru_evicts_what_was_not_used_for_the_longest_time(seed: int, room: int) -> None:
    trace = random_trace(seed, 30, 2, 6, 2)
    expected = [naive_lru(trace[:, layer], room) for layer in range(2)]
    assert hit_rates(LRU(2, 6), trace, [room])[:, 0].tolist() == expected


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("room", [2, 3])
def test_belady_is_the_best_of_all_choices(room: int, optional: bool) -> None:
    for seed in range(5):
        trace = random_trace(seed, 9, 2, 5, 2)
        expected = [most_hits(trace[:, layer], room, optional) for layer in range(2)]
        found = hit_rates(Belady(5, trace), trace, [room], optional=optional)
        assert found[:, 0].tolist() == pytest.approx(expected)


@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_no_policy_hits_more_often_than_belady(seed: int, optional: bool, shared: bool) -> None:
    trace = random_trace(seed, 25, 2, 8, 2)
    best = hit_rates(Belady(8, trace), trace, [2, 5], optional=optional, shared=shared)
    for policy in ONLINE:
        rates = hit_rates(policy(2, 8), trace, [2, 5], optional=optional, shared=shared)
        assert (rates.mean(axis=0) <= best.mean(axis=0) + 1e-12).all()


@given(st.integers(0, 10**6), st.integers(0, 9), st.booleans())
def test_a_cache_keeps_no_more_than_it_has_room_for(seed: int, room: int, optional: bool) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.integers(0, 3, (4, 8)).astype(float)  # some are equal
    cached, needed = generator.random((2, 4, 8)) < 0.4
    kept = retained(scores, cached, needed, room, optional=optional)
    assert not (kept & ~(cached | needed)).any()
    assert kept.sum(axis=1).tolist() == np.minimum((cached | needed).sum(axis=1), room).tolist()
    for layer in range(4):
        out, left = kept[layer], (cached | needed)[layer] & ~kept[layer]
        if not optional:
            assert not (left & needed[layer]).any() or not (out & ~needed[layer]).any()
            out, left = out & ~needed[layer], left & ~needed[layer]
        if out.any() and left.any():
            assert scores[layer][out].min() >= scores[layer][left].max()


def test_with_room_for_all_experts_only_first_uses_miss() -> None:
    trace = random_trace(0, 200, 1, 8, 2)
    for policy in ONLINE:
        assert hit_rates(policy(1, 8), trace, [0, 8])[0].tolist() == [0, 1 - 8 / trace.size]


def test_layers_that_share_slots_use_those_that_others_do_not_need() -> None:
    """One layer always uses the same two experts, the other one six in turn."""
    turn = np.arange(120).reshape(60, 2) % 6
    trace = np.stack([turn % 2, turn], axis=1)
    for policy in ONLINE:
        apart = hit_rates(policy(2, 8), trace, [4])[:, 0]
        together = hit_rates(policy(2, 8), trace, [4], shared=True)[:, 0]
        assert together[0] == apart[0]
        assert together[1] == 1 - 6 / 120 > apart[1]


@pytest.mark.parametrize("policy", ONLINE)
def test_scores_depend_on_the_routing_of_their_layer_only(
    policy: Callable[[int, int], Policy],
) -> None:
    """Also on no type of ids, and on no array that the caller uses again."""
    trace = random_trace(1, 100, 3, 200, 4)
    whole, layers, buffered = policy(3, 200), [policy(1, 200) for _ in range(3)], policy(3, 200)
    buffer = np.zeros((3, 4), np.uint8)
    for experts in trace:
        whole.use(experts)
        buffer[:] = experts
        buffered.use(buffer)
        for layer, own in enumerate(layers):
            own.use(experts[layer : layer + 1])
    assert np.array_equal(whole.scores_LE, buffered.scores_LE)
    assert np.array_equal(whole.scores_LE, np.concatenate([own.scores_LE for own in layers]))


def test_next_use_learns_a_cycle_that_is_longer_than_the_cache() -> None:
    trace = (np.arange(2000) % 6).reshape(2000, 1, 1)
    lru, learned, best = (
        hit_rates(policy, trace, [4]).item()
        for policy in (LRU(1, 6), NextUse(1, 6), Belady(6, trace))
    )
    assert lru == 0
    assert learned > 0.9 * best


def test_next_use_accepts_batches_that_change_in_size() -> None:
    policy, generator = NextUse(2, 16), np.random.default_rng(0)
    for size in [0, *generator.integers(0, 40, 300)]:
        policy.use(generator.integers(0, 4, (2, size)))
    assert np.isfinite(policy.scores_LE).all()
    assert policy.scores_LE[:, :4].min() > policy.scores_LE[:, 4:].max()


@needs_recordings
@pytest.mark.parametrize(
    ("n_tokens", "share"),
    [
        (2_000, 0.3),  # NextUse knows nothing at the start
        pytest.param(5_000, 0.3, marks=pytest.mark.slow),
        pytest.param(20_000, 0.35, marks=pytest.mark.slow),
    ],
)
def test_next_use_closes_a_third_of_the_gap_to_the_optimum(n_tokens: int, share: float) -> None:
    """The gap between LRU and Belady's optimum, on recorded routing."""
    with np.load(TRACE) as file:
        trace = file["experts"][:n_tokens, [0, 6, 12, 18, 23]].astype(np.intp)
    lru = hit_rates(LRU(5, 32), trace, [8, 16]).mean(axis=0)
    learned = hit_rates(NextUse(5, 32), trace, [8, 16]).mean(axis=0)
    best = hit_rates(Belady(32, trace), trace, [8, 16], optional=True).mean(axis=0)
    assert (learned - lru >= share * (best - lru)).all()
