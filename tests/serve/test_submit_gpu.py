"""Submissions on a GPU, where the next batch begins before the tokens of this one are known."""

import json
import random
from pathlib import Path

import pytest
import torch

import overspill
from overspill import SamplingParams
from tests.serve.submissions import Pieces, wait_until_idle
from tests.serve.test_gpu import SMALL, every_place, gpt, offloaded, tokens_of
from tests.serve.test_llm import checkpoint as checkpoint  # a fixture

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_tokens=24)


@every_place
def test_cancels_do_not_change_other_answers(residents: str) -> None:
    plain = gpt(SMALL, torch.float32)
    prompts = [[number + 1, 5, 7] for number in range(6)]
    expected = [tokens_of(plain, prompt, 24) for prompt in prompts]
    choose = random.Random(1)
    with (
        offloaded(plain, residents) as model,
        overspill.LLM(model, context=128, max_batch=4) as llm,
    ):
        for _ in range(10):
            asked = [llm.submit(prompt, GREEDY, Pieces()) for prompt in prompts]
            cancelled = choose.sample(asked, 3)
            for each in cancelled:
                each.cancel()
            for submission, tokens in zip(asked, expected, strict=True):
                if submission not in cancelled:
                    assert submission.result(timeout=60).token_ids == tokens
        wait_until_idle(llm)


@every_place
def test_rules_do_not_change_requests_beside_them(residents: str) -> None:
    plain = gpt(SMALL, torch.float32)
    expected = tokens_of(plain, [1, 2, 3], 24)
    params = [
        GREEDY,
        SamplingParams(max_tokens=24, logit_bias={9: 100}),
        SamplingParams(max_tokens=24, frequency_penalty=2.0, temperature=1.0, seed=3),
    ]
    with (
        offloaded(plain, residents) as model,
        overspill.LLM(model, context=128, max_batch=4) as llm,
    ):
        alone = llm.generate([1, 2, 3], params[2])[0].token_ids
        together = [each.token_ids for each in llm.generate([[1, 2, 3]] * 3, params)]
        assert together == [expected, [9] * 24, alone]


def test_answers_follow_a_schema(checkpoint: Path) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}
    params = [
        SamplingParams(max_tokens=50, json_schema=schema),
        SamplingParams(max_tokens=50, json_schema=schema, temperature=1.0, seed=2),
        SamplingParams(max_tokens=20),
    ]
    with overspill.LLM(checkpoint, device="cuda", context=64) as llm:
        free = llm.generate("b a", params[2])[0]
        *answers, beside = [llm.submit("b a", each) for each in params]
        assert beside.result(timeout=60).token_ids == free.token_ids
        for answer in answers:
            result = answer.result(timeout=60)
            assert result.finish_reason == "stop"
            assert set(json.loads(result.text)) <= {"a", "b"}
