"""Decoding steps of models with states beside keys and values, in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from overspill.serve.blocks import BlockPool
from overspill.serve.checkpoints import Checkpoints
from overspill.serve.loop import ServingLoop
from overspill.serve.options import DecodingOptions
from overspill.serve.scheduler import Scheduler
from tests.models.huggingface.oracle import offloaded
from tests.serve.decode.decoding import (
    BLOCKS,
    CPU,
    INTERPRETED,
    SIZE,
    decoding,
    fused_runner,
    serve,
)
from tests.serve.models import PROMPTS, plain_generate
from tests.serve.requests import make_request
from tests.serve.test_checkpoints import check_greedy
from tests.serve.test_states import STATEFUL, plain_model
from tests.slow import slow_names

pytestmark = INTERPRETED
FUSED = {"qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"}
BOTH = pytest.mark.parametrize("name", slow_names(["granitemoehybrid", "qwen3_next"], "qwen3_next"))


@pytest.mark.parametrize(
    "name", slow_names(STATEFUL, *{*STATEFUL} - {"qwen3_next", "granitemoehybrid"})
)
def test_logits_are_those_of_transformers(
    name: str, tmp_path: Path, steps: list[int], module_steps: list[int]
) -> None:
    """Three of four sequences of a batch are real: one only fills it up."""
    plain, _ = plain_model(name)
    with decoding(plain, tmp_path, "host", slots=2) as made:
        made.two_steps()  # the second begins before the first one's tokens are known
    assert (steps if name in FUSED else module_steps) == [4] * 2


def test_one_request_is_computed_by_products_of_one_row(tmp_path: Path, steps: list[int]) -> None:
    """Of a model whose language model is a part of it; some experts are on the host."""
    plain, _ = plain_model("qwen3_5_moe")
    with decoding(plain, tmp_path, "host", [2, 2], prompts=PROMPTS[:1]) as made:
        made.two_steps()
    assert steps == [1, 1]


@BOTH
def test_steps_and_prompts_in_turn(
    name: str, tmp_path: Path, steps: list[int], module_steps: list[int]
) -> None:
    """A request joins others that decode, and one leaves."""
    plain, expected = plain_model(name)
    with decoding(plain, tmp_path, "host", prompts=PROMPTS[:1]) as made:
        requests = [make_request(prompt, 6) for prompt in PROMPTS[1:]]
        serve(made.runner, requests)  # beside the first one, which keeps its slot
        assert [request.new_tokens for request in requests] == expected[1:]
        assert made.runner._slots is not None
        states = made.runner._slots.memory
        slots = torch.tensor([0, 1])
        saved = states.save(slots)
        for each in states._every():
            each.zero_()
        states.restore(slots, saved)
        for each, kept in zip(states._every(), saved, strict=True):
            assert torch.equal(each[:2], kept)
    assert steps if name in FUSED else module_steps


@BOTH
def test_a_checkpoint_of_an_answer_has_seen_its_tokens_and_no_others(
    name: str, tmp_path: Path, steps: list[int], module_steps: list[int]
) -> None:
    """The step after it begins before the host knows them."""
    plain, _ = plain_model(name)
    checkpoints = Checkpoints(1 << 30, answer_blocks=1)
    with offloaded(plain, "host", tmp_path) as model:
        runner = fused_runner(
            model, CPU, BLOCKS, SIZE, 64, 4, DecodingOptions(slots=2), checkpoints
        )
        pool = BlockPool(BLOCKS, SIZE, checkpoints=checkpoints)
        loop = ServingLoop(runner, Scheduler(pool, 4, 64, singly=True), ends=[])
        prompt, cached = [*range(30, 43)], []
        for count in (6, 4):
            request = make_request(prompt, count)
            loop.add(request)
            loop.run_until(lambda request=request: request.finished)  # type: ignore[misc]
            check_greedy(plain, request.tokens, count)
            prompt = request.tokens
            cached.append(request.cached_tokens)
        assert cached == [0, 16]
        assert len(checkpoints) == 1
        loop.close()
    assert not checkpoints
    assert steps if name in FUSED else module_steps


@BOTH
def test_prompts_of_one_token_begin_without_a_state(
    name: str, tmp_path: Path, steps: list[int], module_steps: list[int]
) -> None:
    """The first ones come before there is memory for states, others after requests that had their
    slots. The next step begins before the first one is recorded."""
    plain, _ = plain_model(name)
    rounds = [[[4]], [[4], [7], [9]], [[4], PROMPTS[0]], [[7]]]
    with offloaded(plain, "gpu", tmp_path) as model:
        runner = fused_runner(model, CPU, BLOCKS, SIZE, 64, 4)
        try:
            for prompts in rounds:
                requests = [make_request(prompt, 3) for prompt in prompts]
                serve(runner, requests)
                answers = [request.new_tokens for request in requests]
                assert answers == [plain_generate(plain, prompt, 3) for prompt in prompts]
        finally:
            runner.close()
    assert steps if name in FUSED else module_steps
