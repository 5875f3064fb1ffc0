"""The scheduler: every request ends, shares what it can, and none waits for a long prompt."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.serve.blocks import BlockPool
from overspill.serve.request import Request
from overspill.serve.scheduler import Scheduler
from tests.serve.requests import Simulated, make_request

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
CONTEXT = 24  # of the longest prompt and four tokens
STEPS = 3000  # far more than any of these need


def run_all(simulated: Simulated) -> None:
    for _ in range(STEPS):
        if not simulated.requests:
            return
        assert simulated.step(), "requests wait, but nothing is computed"
    raise AssertionError("requests do not end")


@given(
    size=st.integers(1, 5),
    more_blocks=st.integers(0, 6),
    max_batch=st.integers(1, 5),
    chunk=st.integers(1, 12),
    actions=st.lists(
        st.one_of(
            PROMPTS,
            st.sampled_from(["step", "step", "interrupted step", "answers", "remove"]),
        ),
        max_size=30,
    ),
)
def test_every_request_ends_if_one_context_fits(
    size: int,
    more_blocks: int,
    max_batch: int,
    chunk: int,
    actions: list[list[int] | str],
) -> None:
    """`Simulated` checks each batch: what it reads, what it writes, and how large it is."""
    n_blocks = -(-CONTEXT // size) + more_blocks
    simulated = Simulated(n_blocks, size, max_batch, chunk)
    added, removed = [], []
    started: list[Request] = []
    for action in actions:
        started += [each for each in simulated.scheduler.running if each not in started]
        if isinstance(action, list):
            added.append(make_request(action))
            simulated.scheduler.add(added[-1])
        elif action == "remove" and simulated.requests:
            removed.append(simulated.requests[len(added) % len(simulated.requests)])
            simulated.scheduler.remove(removed[-1])
        elif simulated.requests:
            simulated.step(action == "interrupted step", prompts=action != "answers")
    run_all(simulated)
    for number, request in enumerate(started):
        later = started[number + 1 :]
        overtaken = any(each in later for each in added[: added.index(request)])
        assert not overtaken or request.prompt_tokens <= chunk // 2, "in order of arrival"
    assert simulated.pool.n_free == n_blocks
    for request in added:
        assert request.finished or request in removed
        tokens = list(request.tokens[: request.prompt_tokens])
        for token in request.new_tokens:  # those of a request that runs alone
            assert token == sum(tokens) % 3
            tokens.append(token)


@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    more_blocks=st.integers(0, 6),
    max_batch=st.integers(1, 4),
)
def test_without_splitting_a_prompt_is_computed_in_one_pass(
    prompts: list[list[int]], more_blocks: int, max_batch: int
) -> None:
    """As models need whose states cannot continue with several tokens. An answer that has given its
    blocks back is computed again token by token, as the first time."""
    simulated = Simulated(6 + more_blocks, 4, max_batch, chunk=CONTEXT, split=False)
    for prompt in prompts:
        simulated.scheduler.add(make_request(prompt))
    for _ in range(STEPS):
        if not simulated.requests:
            return
        computed = {request: request.computed for request in simulated.requests}
        for request, count in simulated.step():
            assert count == (1 if computed[request] else request.prompt_tokens)
    raise AssertionError("requests do not end")


def test_running_requests_get_a_token_with_each_part_of_a_long_prompt() -> None:
    simulated = Simulated(64, 4, chunk=8)
    running = [make_request([1, 2], max_tokens=40), make_request([3], max_tokens=40)]
    for request in running:
        simulated.scheduler.add(request)
    simulated.step()
    long = make_request([5] * 50)
    simulated.scheduler.add(long)
    steps = 0
    while not long.new_tokens:
        before = [len(request.new_tokens) for request in running]
        simulated.step()
        assert [len(request.new_tokens) for request in running] == [n + 1 for n in before]
        steps += 1
    assert steps == 7, "50 tokens in parts of 8"


def test_a_short_prompt_starts_beside_a_part_of_a_long_one() -> None:
    simulated = Simulated(64, 4, chunk=8)
    long, short = make_request([5] * 12), make_request([6, 7])
    for request in (long, short):
        simulated.scheduler.add(request)
    assert simulated.step() == [(long, 6), (short, 2)]
    assert short.new_tokens


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    """Half of each batch is for them; long ones keep their order."""
    simulated = Simulated(64, 4, max_batch=8, chunk=8)
    long = [make_request([number] * 30, max_tokens=1) for number in range(2)]
    short = [make_request([5, number], max_tokens=1) for number in range(6)]
    for request in (*long, *short):
        simulated.scheduler.add(request)
    for number in range(3):
        batch = [(long[0], 4), (short[2 * number], 2), (short[2 * number + 1], 2)]
        assert simulated.step() == batch
    assert simulated.step() == [(long[0], 8)]
    assert simulated.step() == [(long[0], 8)]
    assert simulated.step() == [(long[0], 2), (long[1], 6)]


def test_short_prompts_do_not_overtake_one_that_waits_for_memory() -> None:
    simulated = Simulated(6, 4, chunk=12)
    running, large = make_request([1] * 12, max_tokens=4), make_request([2] * 16)
    for request in (running, large):
        simulated.scheduler.add(request)
    assert simulated.step() == [(running, 12)]
    simulated.scheduler.add(make_request([3, 4]))
    assert simulated.step() == [(running, 1)]


def test_no_more_requests_run_than_max_batch() -> None:
    simulated = Simulated(64, 4, max_batch=2)
    for number in range(5):
        simulated.scheduler.add(make_request([number]))
    simulated.step()
    assert (len(simulated.scheduler.running), len(simulated.scheduler.waiting)) == (2, 3)
    run_all(simulated)


def test_equal_prompts_compute_their_beginning_once() -> None:
    simulated = Simulated(64, 4, chunk=64)
    prompt = list(range(20))
    simulated.scheduler.add(make_request(prompt, max_tokens=1))
    run_all(simulated)
    assert simulated.computed == 20
    simulated.scheduler.add(make_request(prompt, max_tokens=1))
    run_all(simulated)
    assert simulated.computed == 24, "the last block is computed again"


def test_the_request_that_came_last_gives_its_blocks_back() -> None:
    simulated = Simulated(4, 4, chunk=64)
    first, last = make_request([1] * 8, max_tokens=8), make_request([2] * 7, max_tokens=8)
    for request in (first, last):
        simulated.scheduler.add(request)
    simulated.step()
    assert simulated.scheduler.running == [first, last]
    while last in simulated.scheduler.running:
        simulated.step()
    assert list(simulated.scheduler.waiting) == [last]
    run_all(simulated)
    assert len(first.new_tokens) == len(last.new_tokens) == 8


def test_requests_that_gave_their_blocks_back_continue_in_their_order() -> None:
    simulated = Simulated(6, 4, chunk=64)
    requests = [make_request([number] * 7, max_tokens=14) for number in range(3)]
    for request in requests:
        simulated.scheduler.add(request)
    ended = []
    while simulated.requests:
        simulated.step()
        ended += [each for each in requests if each.finished and each not in ended]
    assert ended == requests


def test_a_batch_of_answers_has_no_prompts() -> None:
    simulated = Simulated(64, 4, chunk=8)
    running, long = make_request([1, 2], max_tokens=9), make_request([5] * 12)
    simulated.scheduler.add(running)
    simulated.step()
    simulated.scheduler.add(long)
    assert simulated.step() == [(running, 1), (long, 8)]
    simulated.scheduler.add(make_request([7]))
    assert simulated.step(prompts=False) == [(running, 1)]
    simulated.scheduler.remove(running)
    assert simulated.step(prompts=False)[0] == (long, 4), "without answers prompts do not wait"


def test_a_request_that_needs_the_whole_cache_is_not_overtaken_for_ever() -> None:
    """Two short requests come with every batch."""
    simulated = Simulated(6, 4, max_batch=4, chunk=8)
    large = make_request([9] * 19, max_tokens=4)
    for number in range(4):
        simulated.scheduler.add(make_request([number] * 6, max_tokens=8))
    simulated.scheduler.add(large)
    for steps in range(200):
        for number in range(2):
            simulated.scheduler.add(make_request([steps % 7, number] * 3, max_tokens=8))
        simulated.step()
        if large.finished:
            break
    assert large.finished
    assert steps < 60


@pytest.mark.parametrize("seed", range(30))
def test_sources_are_computed_at_once_and_every_request_ends(seed: int) -> None:
    """Of encoder-decoders: also those longer than a batch's limit, with few blocks."""
    chance = random.Random(seed)
    pool = BlockPool(chance.randint(8, 14), 4, share=False)
    scheduler = Scheduler(pool, chance.randint(1, 4), chance.randint(1, 12))
    requests = []
    for _ in range(8):
        request = make_request([0], chance.randint(1, 12))
        request.source = [1] * chance.randint(1, 16)
        requests.append(request)
        scheduler.add(request)
    for _ in range(1000):
        batch = scheduler.next_batch()
        if not batch:
            break
        used = [b for r in scheduler.running for b in (*r.source_blocks, *r.blocks)]
        assert len(set(used)) == len(used)
        prompts = [work for work in batch if work.request.pending > 1]
        assert len(prompts) == 1 or sum(work.n_tokens for work in prompts) <= scheduler.chunk
        for work in batch:
            request = work.request
            assert work.n_new >= 1
            assert len(request.source_blocks) == -(-len(request.source) // 4)
            scheduler.computed(work)
            if request.pending == 0:
                request.append(1, None, end=False)
            if request.finished:
                scheduler.remove(request)
        pool.check_conserved()
    assert all(request.finished for request in requests)
    assert pool.n_free == pool.n_blocks


@pytest.mark.parametrize(("split", "singly"), [(True, False), (True, True), (False, False)])
def test_a_request_returns_when_there_are_blocks_for_all_that_it_had(
    split: bool, singly: bool
) -> None:
    """Its prompt alone would fit earlier: it would be computed again and again."""
    scheduler = Scheduler(BlockPool(10, 4, share=False), 4, 64, split, singly)
    requests = [make_request(range(8), 30), make_request(range(20), 18)]
    for request in requests:
        scheduler.add(request)
    computed = 0
    while scheduler.running or scheduler.waiting:
        for work in scheduler.next_batch():
            computed += work.n_tokens
            scheduler.computed(work)
            if work.request.pending == 0:
                work.request.append(1, None, end=False)
            if work.request.finished:
                scheduler.remove(work.request)
    once = sum(len(each.tokens) - 1 for each in requests)
    assert computed <= once + len(requests[1].tokens)
