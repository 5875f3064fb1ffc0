"""Requests leave nothing behind: what is kept of them has a limit."""

import random
import time
from pathlib import Path
from typing import Any

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


def held_when_idle(background: Background) -> int:
    """Its thread may still hold the requests of the last batch for a moment."""
    found = [items_held(background)]
    for _ in range(3):
        time.sleep(0.1)
        found.append(items_held(background))
    return min(found)


@pytest.mark.parametrize("prompts", [1_200, pytest.param(50_000, marks=pytest.mark.slow)])
def test_unique_prompts_leave_nothing_in_the_loop(prompts: int) -> None:
    """Twice as many: 100,000 in the slow row."""
    served, draw = Served(), random.Random(0)
    background = Background(served.loop)

    def submit(prompt: list[int], number: int) -> Any:
        params = SamplingParams(max_tokens=2, stop="a")
        stream = TextStream(None, params.stops)
        return background.submit(Request(prompt, params, stream, 1 + number % 2), None)

    def work() -> int:
        for _ in range(prompts // _WAVE):
            prompts_of_wave = enumerate(unique_prompts(draw, _WAVE))
            submissions = [submit(prompt, number) for number, prompt in prompts_of_wave]
            submissions[3].cancel()
            for number, each in enumerate(submissions):
                if number != 3:
                    each.result(60)
        served.loop.run_until(lambda: not served.loop.has_changes)
        served.pool.check_conserved()
        return held_when_idle(background)

    try:
        first = work()
        assert served.pool.n_free == served.pool.n_blocks
        # a leak has an item for each prompt
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
