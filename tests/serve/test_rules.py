"""Penalties, biases and the least number of tokens change what is chosen, and nothing else."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.serve.request import Request
from overspill.serve.rules import Rules, make_rules
from overspill.serve.sampling import Choice
from overspill.serve.scheduler import BatchItem
from overspill.serve.text import TextStream
from tests.serve.fake_runner import FakeRunner, greedy
from tests.serve.models import gpt_tokens, served_gpt, tokens_of

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with served_gpt("gpu", tmp_path_factory.mktemp("rules")) as made:
        yield made


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **options})


def rules_of(given: SamplingParams, *tokens: int, ends: tuple[int, ...] = ()) -> Rules:
    """The rules of a request after these tokens."""
    rules = make_rules(given, None, ends)
    assert rules is not None
    for token in tokens:
        rules.accept(token)
    return rules


def test_parameters_without_rules_leave_requests_plain() -> None:
    assert make_rules(params(temperature=1.0, top_k=3, seed=1), None, [0]) is None
    assert make_rules(params(logit_bias={}), None, [0]) is None


def test_penalties_count_the_tokens_of_the_answer() -> None:
    logits = torch.arange(5.0)
    rules = rules_of(params(frequency_penalty=0.5, presence_penalty=1.0), 4, 4, 2)
    assert rules.adjust(logits).tolist() == [0.0, 1.0, 2.0 - 1.5, 3.0, 4.0 - 2.0]
    assert logits.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0], "the model's logits stay as they are"
    rewards = rules_of(params(frequency_penalty=-2), 0)
    assert rewards.adjust(logits).tolist() == [2.0, 1.0, 2.0, 3.0, 4.0]


def test_biases_are_added() -> None:
    rules = rules_of(params(logit_bias={1: 10.0, 3: -100}))
    assert rules.adjust(torch.arange(5.0)).tolist() == [0.0, 11.0, 2.0, -97.0, 4.0]


def test_the_end_of_the_text_waits_for_min_tokens() -> None:
    given = params(min_tokens=2)
    ends = (1, 4)
    for tokens in ((), (0,)):
        adjusted = rules_of(given, *tokens, ends=ends).adjust(torch.arange(5.0))
        assert adjusted.isinf().tolist() == [False, True, False, False, True]
    after = rules_of(given, 0, 0, ends=ends).adjust(torch.arange(5.0))
    assert after.isfinite().all()


def test_a_banned_token_is_not_in_the_answer(llm: LLM) -> None:
    banned = Counter(gpt_tokens(PROMPT, 8)).most_common(1)[0][0]
    for given in (params(), params(temperature=1.0, seed=1), params(top_p=0.5, temperature=1.0)):
        options = {**vars(given), "logit_bias": {banned: -100}}
        assert banned not in tokens_of(llm, [PROMPT], SamplingParams(**options))[0]


def test_a_favoured_token_is_the_answer(llm: LLM) -> None:
    wanted = [params(logit_bias={7: 100}), params(logit_bias={7: 100}, temperature=1.0)]
    for tokens in tokens_of(llm, [PROMPT] * 2, wanted):
        assert tokens == [7] * 8


def test_a_penalty_of_two_repeats_less(llm: LLM) -> None:
    plain, penalized = tokens_of(
        llm, [PROMPT] * 2, [params(max_tokens=30), params(max_tokens=30, frequency_penalty=2)]
    )
    assert plain == gpt_tokens(PROMPT, 30)
    assert max(Counter(penalized).values()) < max(Counter(plain).values())


def test_rules_do_not_change_requests_beside_them(llm: LLM) -> None:
    given = [params(), params(presence_penalty=2.0), params(temperature=1.0, seed=5)]
    together = tokens_of(llm, [PROMPT] * 3, given)
    assert together == [tokens_of(llm, [PROMPT], each)[0] for each in given]


def test_zero_biases_change_no_greedy_token(llm: LLM) -> None:
    assert tokens_of(llm, [PROMPT], params(logit_bias={5: 0.0})) == [gpt_tokens(PROMPT, 8)]


def test_the_next_batch_waits_for_a_token_that_rules_must_know() -> None:
    """Otherwise it would be chosen without it."""
    for given, waits in ((params(), False), (params(frequency_penalty=0.1), True)):
        request = Request(PROMPT, given, TextStream(None), 8, make_rules(given, None, ()))
        runner = FakeRunner(4, 4)
        request.blocks = [0, 1]
        choice = Choice(
            runner.run([BatchItem(request, request.pending)]), [request.draw()], runner.chosen
        )
        assert choice.tokens() == greedy(PROMPT, 1)
        assert choice.needs_host is waits
