"""Requests leave nothing behind: what is kept of them has a limit."""

import random
from pathlib import Path

import pytest

from overspill import SamplingParams
from overspill.serve.background import Background
from overspill.serve.request import Request
from overspill.serve.text import TextStream
from tests.reachable import items_held
from tests.serve.fake_runner import VOCABULARY
from tests.serve.models import served_gpt
from tests.serve.test_early_batches import Served

_WAVE = 50


def unique_prompts(draw: random.Random, count: int) -> list[list[int]]:
    return [draw.choices(range(VOCABULARY), k=draw.randint(8, 20)) for _ in range(count)]


@pytest.mark.parametrize("prompts", [1_200, pytest.param(50_000, marks=pytest.mark.slow)])
def test_unique_prompts_leave_nothing_in_the_loop(prompts: int) -> None:
    """Twice as many: 100,000 in the slow row."""
    served, draw = Served(), random.Random(0)
    background = Background(served.loop)

    def work() -> int:
        for _ in range(prompts // _WAVE):
            submissions = [
                background.submit(
                    Request(prompt, params := SamplingParams(max_tokens=2, stop="a"),
                            TextStream(None, params.stops), 1 + number % 2),
                    None,
                )
                for number, prompt in enumerate(unique_prompts(draw, _WAVE))
            ]  # fmt: skip
            submissions[3].cancel()
            for number, each in enumerate(submissions):
                if number != 3:
                    each.result(60)
        served.loop.run_until(lambda: not served.loop.has_changes)
        served.pool.check_conserved()
        return items_held(background)

    try:
        first = work()
        assert served.pool.n_free == served.pool.n_blocks
        # the last batch may hold its requests, or not; a leak has an item for each prompt
        assert work() <= first + prompts // 2
    finally:
        background.close()
        served.loop.close()
        background.join()


@pytest.mark.slow
def test_unique_prompts_leave_nothing_in_an_llm(tmp_path: Path) -> None:
    draw = random.Random(0)
    params = SamplingParams(max_tokens=1, logprobs=1)
    with served_gpt("disk", tmp_path) as llm:

        def work() -> int:
            for _ in range(2):
                llm.generate(unique_prompts(draw, _WAVE), params)
            return items_held(llm)

        work()  # things that are made once
        waits = llm._loop.stats.waits
        first = work() - len(waits)
        assert work() - len(waits) <= first + 50
