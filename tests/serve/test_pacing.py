"""Answers go on while prompts are computed, and prompts are computed while answers go on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from overspill import SamplingParams
from overspill.serve.pacing import Pacing
from overspill.serve.params import Piece
from overspill.serve.scheduler import BatchItem
from tests.serve.models import gpt_tokens, served_gpt
from tests.serve.requests import Simulated, make_request
from tests.serve.submissions import tokens_of_submission


class Clock:
    """Batches with prompts take `slow` seconds, others `fast`."""

    def __init__(self, share: float, slow: float, fast: float) -> None:
        self.simulated = Simulated(512, 4, chunk=8)
        self.pacing = Pacing(share)
        self.kinds: list[bool] = []
        self.with_prompts = self.without = 0.0
        self._slow, self._fast = slow, fast

    def step(self) -> None:
        batch = self.simulated.scheduler.next_batch(self.pacing.allows_prompts)
        prompts = any(work.request.pending > 1 for work in batch)
        self.kinds.append(prompts)
        seconds = self._slow if prompts else self._fast
        self.pacing.record(batch, seconds)
        self.with_prompts += seconds * prompts
        self.without += seconds * (not prompts)
        for work in batch:
            self.simulated.scheduler.computed(work)
            if work.request.pending == 0:
                work.request.append(1, None, end=False)


@pytest.mark.parametrize(("slow", "fast"), [(1.0, 0.02), (0.02, 0.008), (0.01, 0.02)])
def test_answers_get_their_share_of_the_time(slow: float, fast: float) -> None:
    clock = Clock(0.25, slow, fast)
    clock.simulated.scheduler.add(make_request([1], max_tokens=10**6))
    clock.step()
    clock.simulated.scheduler.add(make_request([2] * 400, max_tokens=10**6))
    clock.with_prompts = clock.without = 0.0
    while clock.simulated.requests[-1].pending > 1:
        clock.step()
    share = clock.without / (clock.without + clock.with_prompts)
    assert share == pytest.approx(0.25, abs=0.04)


def test_prompts_wait_for_no_one_if_no_answer_runs() -> None:
    clock = Clock(0.25, 1.0, 0.02)
    clock.simulated.scheduler.add(make_request([2] * 80, max_tokens=1))
    while not clock.simulated.requests[0].finished:
        clock.step()
    assert clock.kinds == [True] * 10


def test_one_slow_batch_does_not_hold_prompts_back_for_long() -> None:
    """The first one may compile kernels."""
    pacing = Pacing(0.5)
    answer, prompt = make_request([1]), make_request([2] * 9)
    pacing.record([BatchItem(answer, 1), BatchItem(prompt, 8)], 600.0)
    batches = 0
    while not pacing.allows_prompts:
        pacing.record([BatchItem(answer, 1)], 0.1)
        batches += 1
    assert 1 <= batches <= 20


def test_without_a_share_prompts_never_wait() -> None:
    pacing = Pacing(0)
    pacing.record([BatchItem(make_request([1]), 1), BatchItem(make_request([2] * 9), 8)], 600.0)
    assert pacing.allows_prompts


def test_running_answers_get_a_token_in_each_batch_of_a_long_prompt(tmp_path: Path) -> None:
    with served_gpt("gpu", tmp_path, prefill_chunk=4) as llm:
        batches: list[int] = []
        llm.model.embedding.register_forward_hook(lambda _, args, out: batches.append(out.shape[1]))
        seen: list[list[int]] = [[], []]
        answers = [
            llm.submit([number + 1], SamplingParams(max_tokens=30), follow(each, batches))
            for number, each in enumerate(seen)
        ]
        long = llm.submit(list(range(40)), SamplingParams(max_tokens=1))
        assert tokens_of_submission(long) == gpt_tokens(list(range(40)), 1)
        for number, answer in enumerate(answers):
            assert tokens_of_submission(answer) == gpt_tokens([number + 1], 30)
        assert max(batches) == 6, "four tokens of the prompt, and one of each answer"
        for each in seen:
            assert each == list(range(each[0], each[0] + 30)), "a token in every batch"


def follow(numbers: list[int], batches: list[int]) -> Callable[[Piece], None]:
    """A callback that notes how many batches there were."""
    return lambda piece: numbers.append(len(batches))
