"""Requests that are cancelled in any state leave the others, and all memory, as they should be."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overspill import LLM, SamplingParams
from overspill.serve import llm as llm_module
from tests.serve.models import gpt_tokens, served_gpt
from tests.serve.submissions import (
    LONG,
    SHORT,
    Pieces,
    gated,
    served_tight,
    tokens_of_submission,
    wait_until_idle,
)


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
    assert [tokens_of_submission(each) for each in running] == [gpt_tokens([n], 40) for n in (1, 2)]
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


def test_a_request_whose_prompt_is_computed_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_module, "_CHUNK", 8)
    with served_gpt("gpu", tmp_path) as llm, gated(llm) as gate:
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
        assert tokens_of_submission(other) == gpt_tokens([9], 40)
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
    assert tokens_of_submission(other) == gpt_tokens([4], 40)
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
        assert tokens_of_submission(first) == gpt_tokens([1] * 14, 40)
        wait_until_idle(llm)


def test_the_last_cancel_frees_everything_at_once(llm: LLM) -> None:
    for _ in range(5):
        submissions = [llm.submit([n, 5], LONG) for n in range(4)]
        for each in submissions:
            each.cancel()
        wait_until_idle(llm)


def test_200_random_cancels_do_not_change_other_answers(tmp_path: Path) -> None:
    """From 8 threads, in a cache that is too small for all requests that run."""
    prompts = [[seed % 40 + 1] * (1 + seed % 20) for seed in range(8)]
    short = SamplingParams(max_tokens=12)
    expected = [gpt_tokens(prompt, 12) for prompt in prompts]
    wrong: list[int] = []
    counted = threading.Semaphore(0)

    def load(thread: int) -> None:
        choose = random.Random(thread)
        for _ in range(30):
            kind = choose.randrange(8)
            submission = llm.submit(prompts[kind], short)
            if choose.random() < 25 / 30:
                time.sleep(choose.random() * 0.01)
                submission.cancel()
                counted.release()
            elif tokens_of_submission(submission) != expected[kind]:
                wrong.append(kind)

    with served_tight(5, tmp_path, max_batch=8) as llm:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(load, thread) for thread in range(8)]:
                done.result(timeout=60)
        assert not wrong
        wait_until_idle(llm)
        llm._loop.scheduler.pool.check_conserved()
    assert sum(counted.acquire(blocking=False) for _ in range(240)) > 180
