"""Batches that begin before the host has read the tokens of the one before: tokens do not change.

The model is a function of what is in the blocks of a request, so a wrong slot changes its tokens.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from overspill import SamplingParams
from overspill.core.errors import DiskError, EngineError, NonFiniteError, OrderError
from overspill.serve.blocks import BlockPool
from overspill.serve.loop import ServingLoop
from overspill.serve.request import Request
from overspill.serve.scheduler import BatchItem, Scheduler
from overspill.serve.text import TextStream
from tests.interrupts import spread
from tests.serve.fake_runner import FakeRunner, greedy, logits_after
from tests.serve.test_threads import signal_after

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 1]]


class Served:
    """A loop over a fake model, and the requests that were made."""

    def __init__(
        self,
        early: bool = True,
        ends: Sequence[int] = (),
        n_blocks: int = 64,
        size: int = 4,
        max_batch: int = 4,
        chunk: int = 16,
    ) -> None:
        self.pool = BlockPool(n_blocks, size)
        self.runner = FakeRunner(n_blocks, size, early)
        self.scheduler = Scheduler(self.pool, max_batch, chunk)
        self.loop = ServingLoop(self.runner, self.scheduler, ends)

    def ask(self, prompt: Sequence[int], max_tokens: int = 9, **options: object) -> Request:
        params = SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
        request = Request(prompt, params, TextStream(None), max_tokens)
        self.loop.add(request)
        return request

    def step(self) -> None:
        """One batch."""
        self.loop.run_until(iter([False, False, True, True]).__next__)

    def finish(self, *requests: Request) -> list[list[int]]:
        self.loop.run_until(lambda: all(request.finished for request in requests))
        for request in requests:
            if request.error is not None:
                raise request.error
        return [request.new_tokens for request in requests]

    def check_idle(self) -> None:
        """Everything was given back."""
        self.pool.check_conserved()
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.pool.n_free == self.pool.n_blocks


def test_the_next_batch_begins_early_and_gives_the_tokens_of_the_model() -> None:
    served = Served()
    assert served.finish(served.ask([1, 2, 3])) == [greedy([1, 2, 3], 9)]
    # all but the prompt and the first token after it
    assert served.runner.began_early == 7
    assert served.runner.paused == 1
    served.check_idle()


def test_a_request_that_is_given_up_lets_the_runner_pause() -> None:
    served = Served()
    given_up = served.ask([1, 2, 3])
    served.step()
    served.loop.remove(given_up)
    assert served.runner.paused == 1
    assert served.finish(served.ask([4, 5])) == [greedy([4, 5], 9)]
    served.check_idle()


def test_requests_that_end_at_different_times_get_their_own_tokens() -> None:
    served = Served()
    counts = [3, 12, 7]
    requests = [served.ask(*each) for each in zip(PROMPTS, counts, strict=True)]
    expected = [greedy(*each) for each in zip(PROMPTS, counts, strict=True)]
    assert served.finish(*requests) == expected
    assert [request.finish_reason for request in requests] == ["length"] * 3
    assert served.runner.began_early
    served.check_idle()


def test_a_token_that_ends_the_text_is_the_last_one() -> None:
    """The batch after it has begun, and is computed once too often."""
    for prompt in PROMPTS:
        whole = greedy(prompt, 30)
        for end in sorted(set(whole)):
            served = Served(ends=[end])
            first, other = served.ask(prompt, 30), served.ask([3, 3], 20, ignore_eos=True)
            expected = whole[: whole.index(end) + 1]
            assert served.finish(first, other) == [expected, greedy([3, 3], 20)]
            assert first.finish_reason == "stop"
            served.check_idle()


def test_a_text_that_ended_does_not_change_the_next_one() -> None:
    """Also if it uses the blocks that the batch too much has written."""
    whole = greedy([1, 2, 3], 30)
    end = whole[6]
    served = Served(ends=[end], n_blocks=8)
    for prompt in (*PROMPTS, [1, 2, 3], [*[1, 2, 3], *whole[:3]]):
        expected = greedy(prompt, 15, frozenset([end]))
        assert served.finish(served.ask(prompt, 15)) == [expected]
        served.check_idle()


def test_requests_join_while_a_batch_is_ahead() -> None:
    served = Served()
    requests = [served.ask([1, 2, 3], 20)]
    for _ in range(5):
        served.step()
    assert served.runner.began_early
    for number, prompt in enumerate(PROMPTS):
        requests.append(served.ask(prompt, 5 + number))
        served.step()
    expected = [greedy([1, 2, 3], 20), *(greedy(p, 5 + n) for n, p in enumerate(PROMPTS))]
    assert served.finish(*requests) == expected
    served.check_idle()


def test_a_request_that_is_not_wanted_any_more_leaves_the_batch_that_is_ahead() -> None:
    for steps in range(1, 8):
        served = Served()
        gone, stays = served.ask([1, 2, 3], 20), served.ask([4], 12)
        for _ in range(steps):
            served.step()
        served.loop.remove(gone)
        assert served.finish(stays) == [greedy([4], 12)]
        assert not gone.finished
        assert gone.new_tokens == greedy([1, 2, 3], 20)[: len(gone.new_tokens)]
        served.check_idle()


def test_the_only_request_can_leave_and_another_one_come() -> None:
    for steps in range(1, 6):
        served = Served(n_blocks=6)
        gone = served.ask([1, 2, 3], 12)
        for _ in range(steps):
            served.step()
        served.loop.remove(gone)
        assert served.finish(served.ask([5, 6], 12)) == [greedy([5, 6], 12)]
        served.check_idle()


def test_requests_with_logprobs_are_not_computed_early() -> None:
    """The next batch would overwrite the logits."""
    served = Served()
    request, other = served.ask([1, 2, 3], 5, logprobs=2), served.ask([4], 9)
    assert served.finish(request, other) == [greedy([1, 2, 3], 5), greedy([4], 9)]
    assert served.runner.began_early == 3, "after the first request has ended"
    tokens = [1, 2, 3]
    for token, logprobs in zip(request.new_tokens, request.logprobs, strict=True):
        expected = logits_after(tokens).log_softmax(-1)
        assert logprobs[token] == pytest.approx(float(expected[token]))
        tokens.append(token)


@pytest.mark.parametrize("early", [False, True])
def test_seeds_give_the_same_tokens_with_and_without_early_batches(early: bool) -> None:
    options = {"temperature": 1.3, "top_k": 9, "seed": 5}
    alone = Served(early=False)
    (expected,) = alone.finish(alone.ask([1, 2, 3], 20, **options))
    assert expected != greedy([1, 2, 3], 20)
    served = Served(early)
    requests = [served.ask([4], 7, temperature=0.7), served.ask([1, 2, 3], 20, **options)]
    for _ in range(6):
        served.step()
    requests.append(served.ask([9, 9], 7, temperature=0.9, seed=8))
    assert served.finish(*requests)[1] == expected
    assert bool(served.runner.began_early) is early


def test_too_few_blocks_let_requests_wait_and_change_nothing() -> None:
    """Three requests that grow to four blocks each share six."""
    served = Served(n_blocks=6)
    requests = [served.ask(prompt, 7) for prompt in PROMPTS]
    assert served.finish(*requests) == [greedy(prompt, 7) for prompt in PROMPTS]
    assert served.runner.began_early
    served.check_idle()


def test_the_end_of_a_prompt_beside_a_request_without_a_free_block_changes_nothing() -> None:
    """What the prompt has is not free for the other one."""
    served = Served(n_blocks=8, chunk=5)
    requests = [served.ask([0], 6)]
    served.step()
    requests += [served.ask([0] * length, count) for length, count in ((3, 4), (3, 3), (9, 2))]
    expected = [greedy([0], 6), greedy([0] * 3, 4), greedy([0] * 3, 3), greedy([0] * 9, 2)]
    assert served.finish(*requests) == expected
    served.check_idle()


def test_batches_begin_early_while_others_wait_for_a_place() -> None:
    served = Served(max_batch=1)
    requests = [served.ask(prompt) for prompt in PROMPTS]
    assert served.finish(*requests) == [greedy(prompt, 9) for prompt in PROMPTS]
    assert served.runner.began_early == 3 * 7 + 1, "a prompt of one token is a token"
    served.check_idle()


def test_a_request_can_fill_all_blocks() -> None:
    served = Served(n_blocks=4)
    assert served.finish(served.ask([1, 2, 3], 14)) == [greedy([1, 2, 3], 14)]
    served.check_idle()


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_failure_of_a_batch_that_begins_early_fails_its_requests_alone(at: int) -> None:
    served = Served(max_batch=2)
    error = RuntimeError("injected")
    served.runner.fail_early[at] = error
    first, second, waits = (served.ask(prompt) for prompt in PROMPTS)
    with pytest.raises(RuntimeError, match="injected"):
        served.finish(first, second)
    assert first.error is second.error is error
    assert served.finish(waits, served.ask([1, 2, 3])) == [
        greedy(PROMPTS[2], 9),
        greedy([1, 2, 3], 9),
    ]
    served.check_idle()


def test_a_failure_beside_the_device_is_raised_before_its_tokens_are_given() -> None:
    """Also in the last batch."""
    served = Served()
    request = served.ask([1, 2, 3], 5)
    served.loop.run_until(lambda: len(request.new_tokens) == 4)
    served.runner.failures.append(EngineError("injected"))
    with pytest.raises(EngineError, match="injected"):
        served.finish(request)
    assert request.new_tokens == greedy([1, 2, 3], 4)
    assert served.finish(served.ask([1, 2, 3], 5)) == [greedy([1, 2, 3], 5)]
    served.check_idle()


def test_a_request_that_has_ended_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with it has begun, and cannot read an expert."""
    whole = greedy([1, 2, 3], 30)
    served = Served(ends=[whole[6]])
    other = served.ask([3, 3], 20, ignore_eos=True)
    first = served.ask([1, 2, 3], 30)
    served.loop.run_until(lambda: first.finished)
    assert served.loop._ahead is not None
    runs: list[list[Request]] = []
    run = served.runner.run

    def noted(batch: Sequence[BatchItem]) -> torch.Tensor:
        runs.append([work.request for work in batch])
        return run(batch)

    monkeypatch.setattr(served.runner, "run", noted)
    served.runner.failures.append(DiskError("injected"))
    assert served.finish(first, other) == [whole[:7], greedy([3, 3], 20)]
    assert runs == [[other], [other]], "alone, and then as always"
    served.check_idle()


def test_an_expert_that_only_the_batch_after_the_last_token_needs_fails_no_request() -> None:
    whole = greedy([1, 2, 3], 30)
    served = Served(ends=[whole[6]])
    served.runner.fail_beside[6] = DiskError("injected")  # the eighth token
    assert served.finish(served.ask([1, 2, 3], 30)) == [whole[:7]]
    assert served.runner.asked_early == 6
    served.check_idle()


def test_a_batch_that_fails_after_it_was_given_up_fails_no_later_request() -> None:
    whole = greedy([1, 2, 3], 30)
    served = Served(ends=[whole[6]])
    assert served.finish(served.ask([1, 2, 3], 30)) == [whole[:7]]
    served.runner.failures.append(DiskError("injected"))
    expected = greedy([4, 5], 9, frozenset([whole[6]]))
    assert served.finish(served.ask([4, 5])) == [expected]
    served.check_idle()


def test_logits_without_finite_values_fail_their_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served()
    good, bad = served.ask([1, 2, 3], 12), served.ask([4], 12)
    plain = served.runner.continue_with

    def spoiled(batch: Sequence[object], tokens: torch.Tensor) -> torch.Tensor | None:
        logits = plain(batch, tokens)  # type: ignore[arg-type]
        if served.runner.began_early == 4 and logits is not None:
            logits = logits.clone()
            logits[1] = float("nan")
            served.runner.chosen = None
        return logits

    monkeypatch.setattr(served.runner, "continue_with", spoiled)
    assert served.finish(good) == [greedy([1, 2, 3], 12)]
    with pytest.raises(NonFiniteError):
        served.finish(bad)
    assert bad.new_tokens == greedy([4], 5)
    served.check_idle()


def test_close_while_a_batch_is_ahead_ends_requests_with_an_error() -> None:
    served = Served()
    running, waiting = served.ask([1, 2, 3], 20), served.ask([4], 20)
    for _ in range(4):
        served.step()
    assert served.runner.began_early
    late = served.ask([5])
    served.loop.close()
    for request in (running, waiting, late):
        with pytest.raises(OrderError, match="this LLM was closed"):
            served.finish(request)
    assert served.runner.closed
    served.check_idle()


def test_ctrl_c_at_any_time_loses_no_token_of_another_request() -> None:
    """A real signal, after so many calls of the serving loop."""
    options = {"temperature": 1.0, "seed": 5}
    alone = Served()
    (expected,) = alone.finish(alone.ask([1, 2, 3], 12, **options))

    def run(served: Served) -> Callable[[], object]:
        return lambda: finish_or_remove(served, served.ask([4], 8))

    served = Served()
    served.ask([1, 2, 3], 12, **options)
    calls = signal_after(None, run(served))
    for at in spread(calls, 60):
        served = Served()
        other = served.ask([1, 2, 3], 12, **options)
        with contextlib.suppress(KeyboardInterrupt):
            signal_after(at, run(served))
        assert served.finish(other) == [expected], at
        served.finish(served.ask([4], 8))  # takes what was interrupted to its end
        served.check_idle()


def finish_or_remove(served: Served, request: Request) -> None:
    """As `LLM.generate`."""
    try:
        served.finish(request)
    finally:
        served.loop.remove(request)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_while_a_batch_begins_early_changes_no_tokens(at: int) -> None:
    """The second Ctrl-C, or one with a handler of the user, takes effect at once."""
    served = Served()
    served.runner.fail_early[at] = KeyboardInterrupt()
    requests = [served.ask(prompt) for prompt in PROMPTS]
    with pytest.raises(KeyboardInterrupt):
        served.finish(*requests)
    assert served.finish(*requests) == [greedy(prompt, 9) for prompt in PROMPTS]
    served.check_idle()


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_when_a_batch_has_begun_early_changes_no_tokens(at: int) -> None:
    """It has overwritten the tokens that it began with."""
    served = Served()
    served.runner.fail_late[at] = KeyboardInterrupt()
    requests = [served.ask(prompt) for prompt in PROMPTS]
    with pytest.raises(KeyboardInterrupt):
        served.finish(*requests)
    assert served.finish(*requests) == [greedy(prompt, 9) for prompt in PROMPTS]
    served.check_idle()


def test_an_interrupt_before_the_tokens_are_read_changes_no_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served()
    requests = [served.ask(prompt) for prompt in PROMPTS]
    check, calls = served.runner.check, []

    def interrupt() -> None:
        calls.append(None)
        if len(calls) in (2, 5):
            raise KeyboardInterrupt
        check()

    monkeypatch.setattr(served.runner, "check", interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            served.finish(*requests)
    assert served.finish(*requests) == [greedy(prompt, 9) for prompt in PROMPTS]
    served.check_idle()


def test_threads_take_turns_with_batches_that_are_ahead() -> None:
    served = Served(max_batch=6, n_blocks=40)
    got: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        for each in range(3):
            prompt = [number, each]
            (got[10 * number + each],) = served.finish(served.ask(prompt, 5 + number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {10 * n + e: greedy([n, e], 5 + n) for n in range(5) for e in range(3)}
    assert served.runner.began_early
    served.check_idle()


Arrival = tuple[int, list[int], int, int | None, int | None]


@hypothesis_settings(max_examples=60)
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 12),  # batches before it comes
            st.lists(st.integers(0, 2), min_size=1, max_size=9),
            st.integers(1, 10),  # tokens
            st.none() | st.integers(0, 3),  # seed
            st.none() | st.integers(0, 8),  # batches until it is given up
        ),
        min_size=1,
        max_size=6,
    ),
    ends=st.sets(st.integers(0, 12), max_size=2),
    n_blocks=st.integers(6, 20),
    max_batch=st.integers(1, 4),
    chunk=st.integers(2, 12),
)
def test_tokens_do_not_depend_on_what_runs_beside(
    arrivals: list[Arrival], ends: set[int], n_blocks: int, max_batch: int, chunk: int
) -> None:
    served = Served(True, sorted(ends), n_blocks, 4, max_batch, chunk)
    made: list[tuple[Request, Arrival, dict[str, object]]] = []
    for batch in range(24):
        for arrival in arrivals:
            if arrival[0] == batch:
                seed = arrival[3]
                options = {} if seed is None else {"temperature": 1.0, "seed": seed}
                made.append((served.ask(arrival[1], arrival[2], **options), arrival, options))
        for request, arrival, _ in made:
            if arrival[4] is not None and arrival[0] + arrival[4] == batch:
                served.loop.remove(request)
        if any(not r.finished and a[4] is None for r, a, _ in made):
            served.step()
    kept = [request for request, arrival, _ in made if arrival[4] is None]
    served.finish(*kept)
    for request, arrival, options in made:
        alone = Served(False, sorted(ends))
        (expected,) = alone.finish(alone.ask(arrival[1], arrival[2], **options))
        tokens = request.new_tokens
        assert tokens == (expected if arrival[4] is None else expected[: len(tokens)])
        served.loop.remove(request)
    served.loop.close()
    served.check_idle()
