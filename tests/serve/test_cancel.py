"""Requests that are cancelled in any state leave the others, and all memory, as they should be."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overspill import LLM, SamplingParams
from overspill.serve.background import Background, Submission
from overspill.serve.blocks import BlockPool
from overspill.serve.loop import ServingLoop
from overspill.serve.pacing import Pacing
from overspill.serve.scheduler import Scheduler
from tests.serve.fake_runner import FakeRunner, greedy
from tests.serve.models import gpt_tokens, served_gpt
from tests.serve.requests import make_request
from tests.serve.submissions import (
    LONG,
    SHORT,
    Pieces,
    gated,
    served_tight,
    tokens_of_submission,
    wait_until_idle,
)
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with served_gpt("gpu", tmp_path_factory.mktemp("cancel"), max_batch=2) as made:
        yield made


def test_a_request_that_waits_is_cancelled(llm: LLM) -> None:
    with gated(llm) as gate:
        running = [llm.submit([number], LONG) for number in (1, 2)]
        gate.wait_for_batch()
        gate.let_through()
        pieces = Pieces()
        waiting = llm.submit([3], LONG, pieces)
        gate.let_through()
        assert llm.stats()["waiting"] == 1
        waiting.cancel()
        gate.let_through()
        assert (llm.stats()["waiting"], pieces.all) == (0, [])
    assert [tokens_of_submission(each) for each in running] == [gpt_tokens([n], 24) for n in (1, 2)]
    wait_until_idle(llm)


def test_a_request_that_has_not_arrived_is_cancelled(llm: LLM) -> None:
    with gated(llm) as gate:
        running = llm.submit([1], SHORT)
        gate.wait_for_batch()
        pieces = Pieces()
        llm.submit([3], LONG, pieces).cancel()
    assert tokens_of_submission(running) == gpt_tokens([1], 4)
    assert pieces.all == []
    wait_until_idle(llm)


def test_a_request_whose_prompt_is_computed_is_cancelled(tmp_path: Path) -> None:
    with served_gpt("gpu", tmp_path, prefill_chunk=8) as llm, gated(llm) as gate:
        other = llm.submit([9], LONG)
        gate.wait_for_batch()
        pieces = Pieces()
        long = llm.submit(list(range(40)), SHORT, pieces)
        while llm.stats()["prompt_tokens"] < 9:  # a part of the prompt
            gate.let_through()
        assert llm.stats()["running"] == 2
        long.cancel()
        gate.let_through(2)
        stats = llm.stats()
        assert (stats["running"], stats["kv_blocks"] - stats["kv_blocks_free"]) == (1, 1)
        gate.open()
        assert tokens_of_submission(other) == gpt_tokens([9], 24)
        assert pieces.all == []
        wait_until_idle(llm)


def test_an_answer_is_cancelled_between_two_tokens(llm: LLM) -> None:
    pieces = Pieces()
    with gated(llm) as gate:
        cancelled = llm.submit([1, 2], LONG, pieces)
        gate.wait_for_batch()
        gate.let_through(3)
        other = llm.submit([4], LONG)
        cancelled.cancel()
        cancelled.cancel()
        assert cancelled.finished
        gate.let_through(1)
        assert llm.stats()["running"] == 1, "its blocks are free before the next batch"
    assert tokens_of_submission(other) == gpt_tokens([4], 24)
    assert pieces.tokens == gpt_tokens([1, 2], 3), "no piece after cancel"
    wait_until_idle(llm)


def test_a_request_that_gave_its_blocks_back_is_cancelled(tmp_path: Path) -> None:
    with served_tight(4, tmp_path) as llm, gated(llm) as gate:
        first, last = llm.submit([1] * 14, LONG), llm.submit([2] * 14, LONG)
        gate.wait_for_batch()
        for _ in range(40):
            gate.let_through()
            if last.usage.new_tokens and llm.stats()["waiting"]:
                break
        assert (llm.stats()["running"], llm.stats()["waiting"]) == (1, 1)
        last.cancel()
        gate.open()
        assert tokens_of_submission(first) == gpt_tokens([1] * 14, 24)
        wait_until_idle(llm)


def test_the_last_cancel_frees_everything_at_once(llm: LLM) -> None:
    for _ in range(5):
        submissions = [llm.submit([n, 5], LONG) for n in range(4)]
        for each in submissions:
            each.cancel()
        wait_until_idle(llm)
        assert all(each.cancelled for each in submissions)


class Load:
    """Threads that submit requests and cancel most of them at any time."""

    def __init__(self, ask: Callable[[list[int]], Submission], expected: dict[int, list[int]]):
        """`expected` are the tokens after prompts of this length."""
        self._ask, self._expected = ask, expected
        self.wrong: list[list[int]] = []
        self.cancelled = 0
        self._lock = threading.Lock()

    def run(self, threads: int, requests: int, longest: float) -> None:
        with ThreadPoolExecutor(threads) as pool:
            runs = [pool.submit(self._run, seed, requests, longest) for seed in range(threads)]
            for each in runs:
                each.result(timeout=60)

    def _run(self, seed: int, requests: int, longest: float) -> None:
        choose = random.Random(seed)
        for _ in range(requests):
            length = choose.choice(list(self._expected))
            submission = self._ask([length % 5] * length)
            if choose.random() < 0.8:
                time.sleep(choose.random() * longest)
                submission.cancel()
                with self._lock:
                    self.cancelled += 1
            elif (tokens := tokens_of_submission(submission)) != self._expected[length]:
                self.wrong.append(tokens)


def test_random_cancels_do_not_change_other_answers(tmp_path: Path) -> None:
    """From 8 threads, in a cache that is too small for all requests that run."""
    params = SamplingParams(max_tokens=6)
    expected = {n: gpt_tokens([n % 5] * n, 6) for n in (1, 3, 14, 20)}
    with served_tight(5, tmp_path, max_batch=8) as llm:
        load = Load(lambda prompt: llm.submit(prompt, params), expected)
        load.run(threads=8, requests=8, longest=0.02)
        wait_until_idle(llm)
    assert not load.wrong
    assert load.cancelled > 40


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_400_random_cancels_of_batches_that_begin_early(early: bool) -> None:
    """A batch may be on the device that has requests which are cancelled."""
    runner, pool = FakeRunner(9, 4, early), BlockPool(9, 4)
    loop = ServingLoop(runner, Scheduler(pool, 6, chunk=8), ends=[], pacing=Pacing(0.25))
    background = Background(loop)

    def ask(prompt: list[int]) -> Submission:
        return background.submit(make_request(prompt, max_tokens=12), None)

    load = Load(ask, {n: greedy([n % 5] * n, 12) for n in (1, 3, 7, 14, 20)})
    load.run(threads=8, requests=63, longest=0.002)
    wait_until(lambda: pool.n_free == pool.n_blocks)
    background.close()
    background.join()
    pool.check_conserved()
    assert not load.wrong
    assert load.cancelled > 350
    assert (runner.began_early > 5) is early
