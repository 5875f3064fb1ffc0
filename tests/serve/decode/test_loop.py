"""Fused steps through the serving loop."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overspill import SamplingParams, Settings
from overspill.core.errors import EngineError
from overspill.serve.request import Request
from overspill.serve.rules import make_rules
from overspill.serve.text import TextStream
from tests.models.huggingface.oracle import offloaded
from tests.serve.decode.decoding import BLOCKS, CPU, INTERPRETED, SIZE, fused_runner, serve
from tests.serve.models import PROMPTS, plain_model
from tests.serve.requests import make_request

pytestmark = INTERPRETED


@pytest.mark.parametrize(
    "residents",
    [
        pytest.param([4, 4], id="on the device", marks=pytest.mark.slow),
        pytest.param([1, 2], id="some in host memory"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    residents: list[int], tmp_path: Path, steps: list[int]
) -> None:
    plain, expected = plain_model("mixtral")
    with offloaded(plain, "host", tmp_path) as model:
        model.overspill.set_residents(residents)
        runner = fused_runner(model, CPU, BLOCKS, SIZE, 64, 2)
        requests = [make_request(PROMPTS[0], 4), make_request(PROMPTS[1], 2)]
        serve(runner, requests).close()
    assert [request.new_tokens for request in requests] == [expected[0][:4], expected[1][:2]]
    assert sorted(set(steps)) == [1, 2]


def test_rules_of_one_request_do_not_change_the_tokens_of_another(
    tmp_path: Path, steps: list[int]
) -> None:
    """The step draws a token for both, and the host replaces one of them."""
    plain, expected = plain_model("mixtral")
    favoured = SamplingParams(max_tokens=3, logit_bias={7: 100})
    ruled = Request(
        PROMPTS[0], favoured, TextStream(None), 3, make_rules(favoured, None, frozenset())
    )
    beside = make_request(PROMPTS[0], 4)
    with offloaded(plain, "gpu", tmp_path) as model:
        serve(fused_runner(model, CPU, BLOCKS, SIZE, 64, 2), [ruled, beside]).close()
    assert ruled.new_tokens == [7, 7, 7]
    assert beside.new_tokens == expected[0][:4]
    assert 2 in steps


def test_a_batch_without_memory_to_begin_early_begins_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.serve.decode.decode import Decode

    run, refused = Decode.run, []

    def fail(self: Decode, tokens: Any, *others: Any) -> Any:
        if isinstance(tokens, Tensor):
            refused.append(1)
            raise torch.OutOfMemoryError("injected")
        return run(self, tokens, *others)

    monkeypatch.setattr(Decode, "run", fail)
    plain, expected = plain_model("mixtral")
    with offloaded(plain, "gpu", tmp_path) as model:
        runner = fused_runner(model, CPU, BLOCKS, SIZE, 64, 2)
        made = make_request(PROMPTS[0], 4)
        serve(runner, [made]).close()
    assert refused
    assert made.new_tokens == expected[0][:4]


def test_a_failure_of_the_cpu_fails_its_requests(tmp_path: Path) -> None:
    """Also with the last token; the next request works."""
    calls = itertools.count()
    fails: set[int] = set()

    def inject(kind: str) -> None:
        if kind == "cpu" and next(calls) in fails:
            raise EngineError("injected")

    plain, expected = plain_model("mixtral")
    with offloaded(plain, "host", tmp_path, Settings(inject=inject)) as model:
        runner = fused_runner(model, CPU, BLOCKS, SIZE, 64, 2)
        made = make_request(PROMPTS[0], 2)
        serve(runner, [made])
        assert made.new_tokens == expected[0][:2]
        fails.add(next(calls) + 1)
        failed = make_request(PROMPTS[1], 2)
        serve(runner, [failed])
        assert str(failed.error) == "injected"
        again = make_request(PROMPTS[1], 2)
        serve(runner, [again])
        assert again.new_tokens == expected[1][:2]
        runner.close()
