"""`LLM.submit`: answers that a thread of the LLM computes, piece by piece."""

import gc
import logging
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from overspill import LLM, SamplingParams
from overspill.core.errors import ConfigError, OrderError
from overspill.serve.params import Piece, Usage
from tests.moe.oracle import threads_left
from tests.serve.models import gpt_tokens, served_gpt, tokens_of
from tests.serve.submissions import (
    LONG,
    SHORT,
    Pieces,
    gated,
    served_tight,
    tokens_of_submission,
    wait_until_idle,
)
from tests.serve.test_threads import in_thread
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with served_gpt("gpu", tmp_path_factory.mktemp("submit"), max_batch=4) as made:
        yield made


def test_pieces_are_those_of_a_stream(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, logprobs=2, temperature=1.0, seed=3)
    pieces = Pieces()
    submission = llm.submit([1, 2, 3], params, pieces)
    result = submission.result(timeout=60)
    assert pieces.all == list(llm.stream([1, 2, 3], params))
    assert result == llm.generate([1, 2, 3], params)[0]
    assert [piece.finish_reason for piece in pieces.all] == [None] * 5 + ["length"]
    assert [logs for piece in pieces.all for logs in piece.logprobs or ()] == result.logprobs
    assert submission.finished
    assert submission.error is None


def test_a_submission_without_a_callback_has_a_result(llm: LLM) -> None:
    assert tokens_of_submission(llm.submit([7], SHORT)) == gpt_tokens([7], 4)


def test_usage_tells_what_was_in_the_cache(llm: LLM) -> None:
    prompt = list(range(40))
    first, again = (llm.submit(prompt, SHORT) for _ in range(2))
    assert first.result(timeout=60).usage == Usage(40, 4, 0)
    assert again.result(timeout=60).prompt_tokens == 40
    later = llm.submit(prompt, SHORT)
    later.result(timeout=60)
    assert later.usage == Usage(prompt_tokens=40, new_tokens=4, cached_tokens=32)


@pytest.mark.slow
def test_requests_of_32_threads_get_their_own_tokens(llm: LLM) -> None:
    """Beside `generate` and `stream`."""
    prompts = [[number + 1, number % 5] for number in range(32)]
    expected = [gpt_tokens(prompt, 4) for prompt in prompts]

    def ask(number: int) -> list[int]:
        if number % 8 == 0:
            return tokens_of(llm, [prompts[number]], SHORT)[0]
        if number % 8 == 1:
            return [piece.token_ids[0] for piece in llm.stream(prompts[number], SHORT)]
        return tokens_of_submission(llm.submit(prompts[number], SHORT))

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(32))) == expected
    wait_until_idle(llm)


@pytest.mark.parametrize(
    ("prompt", "params", "on_piece", "message"),
    [
        ([], None, None, "the prompt is empty"),
        ([999], None, None, "token id 999 is not one of"),
        ("text", None, None, "no tokenizer"),
        ([1] * 64, None, None, "leaves no room"),
        ([1], SHORT, "print", "on_piece='print' must be a function"),
        ([1], {"max_tokens": 3}, None, "is not SamplingParams"),
        ([1], SamplingParams(logit_bias={48: 1.0}), None, "logit_bias has token id 48; this"),
        ([1], SamplingParams(json_schema={}), None, "no tokenizer; a json_schema needs one"),
    ],
)
def test_what_is_invalid_is_refused_at_once(
    llm: LLM, prompt: Any, params: Any, on_piece: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.submit(prompt, params, on_piece)
    wait_until_idle(llm)


def test_submit_returns_while_a_batch_is_computed(llm: LLM) -> None:
    with gated(llm) as gate:
        first = llm.submit([1, 2], SHORT)
        gate.wait_for_batch()
        second = llm.submit([3, 4], SHORT)
        stats = llm.stats()
        assert (stats["running"], stats["waiting"]) == (1, 1)
        assert stats["kv_blocks_free"] == stats["kv_blocks"] - 1
        assert not first.finished
        with pytest.raises(TimeoutError, match="no result after 0"):
            second.result(timeout=0.01)
    assert tokens_of_submission(first) == gpt_tokens([1, 2], 4)
    assert tokens_of_submission(second) == gpt_tokens([3, 4], 4)


def test_the_thread_uses_no_processor_time_while_it_waits(llm: LLM) -> None:
    llm.submit([1], SHORT).result(timeout=60)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_a_callback_that_raises_ends_its_own_request_only(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Piece] = []

    def fail(piece: Piece) -> None:
        calls.append(piece)
        if len(calls) == 2:
            raise SystemExit("from a callback")

    with caplog.at_level(logging.ERROR, "overspill"):
        failing, other = llm.submit([1, 2], LONG, fail), llm.submit([3], LONG)
        assert tokens_of_submission(other) == gpt_tokens([3], 24)
    assert (len(calls), failing.cancelled) == (2, True)
    assert len(caplog.records) == 1
    assert "a callback of LLM.submit failed" in caplog.text
    with pytest.raises(OrderError, match="this request was cancelled"):
        failing.result()
    wait_until_idle(llm)


def test_a_callback_may_cancel_and_submit(llm: LLM) -> None:
    pieces = Pieces()
    second = Pieces()

    def follow(piece: Piece) -> None:
        pieces(piece)
        if len(pieces.all) == 3:
            submission.cancel()
            submission.cancel()
            llm.submit([5, 6], SHORT, second)

    with gated(llm):  # until `submission` is known
        submission = llm.submit([1, 2], LONG, follow)
    assert second.ended.wait(60)
    assert second.tokens == gpt_tokens([5, 6], 4)
    assert pieces.tokens == gpt_tokens([1, 2], 3)
    wait_until_idle(llm)


def test_a_callback_that_would_wait_for_itself_is_refused(llm: LLM) -> None:
    errors: list[str] = []

    def wait(piece: Piece) -> None:
        for call in (
            lambda: llm.generate([1], SHORT),
            lambda: next(llm.stream([1], SHORT)),
            llm.close,
            submission.result,
        ):
            try:
                call()
            except OrderError as error:
                errors.append(str(error))

    with gated(llm):
        submission = llm.submit([1, 2], SamplingParams(max_tokens=2), wait)
    assert tokens_of_submission(submission) == gpt_tokens([1, 2], 2)
    assert sum("waits for batches, which wait for this callback" in each for each in errors) == 6
    assert sum("no result before its last piece" in each for each in errors) == 1
    assert len(errors) == 7, "with the last piece there is a result"
    assert tokens_of_submission(llm.submit([3], SHORT)) == gpt_tokens([3], 4)


def test_an_abandoned_llm_ends_its_thread(tmp_path: Path) -> None:
    with served_gpt("gpu", tmp_path) as outer:
        model = outer.model
        outer.close()
        inner = LLM(model, context=64)
        inner.submit([1, 2], SHORT).result(timeout=60)
        threads = threads_left().count("overspill-serve")
        reference = weakref.ref(inner)
        del inner
        gc.collect()
        assert reference() is None
        wait_until(lambda: threads_left().count("overspill-serve") == threads - 1)


@pytest.mark.slow
def test_requests_in_a_small_cache_get_the_tokens_of_a_large_one(tmp_path: Path) -> None:
    """Some give their blocks back and are computed again."""
    prompts = [[number + 1] * (12 + number) for number in range(4)]
    greedy = SamplingParams(max_tokens=20)
    drawn = SamplingParams(max_tokens=20, temperature=1.0, seed=4)
    with served_gpt("gpu", tmp_path, max_batch=4) as roomy:
        expected = [tokens_of(roomy, [prompt], drawn)[0] for prompt in prompts]
    with served_tight(6, tmp_path, max_batch=4) as llm:
        for params, right in ((greedy, [gpt_tokens(p, 20) for p in prompts]), (drawn, expected)):
            with gated(llm):  # all at once
                asked = [llm.submit(prompt, params) for prompt in prompts]
            assert [tokens_of_submission(each) for each in asked] == right
        assert llm.stats()["prompt_tokens"] > 2 * sum(map(len, prompts)), "some are recomputed"
        wait_until_idle(llm)


def test_an_answer_goes_on_while_a_thread_waits_for_another(llm: LLM) -> None:
    long = llm.submit([1, 2, 3], SamplingParams(max_tokens=30))
    assert tokens_of(llm, [[4, 5]], SHORT) == [gpt_tokens([4, 5], 4)]
    other = in_thread(lambda: llm.generate([6], SHORT))
    assert other.join()[0].token_ids == gpt_tokens([6], 4)
    assert tokens_of_submission(long) == gpt_tokens([1, 2, 3], 30)
