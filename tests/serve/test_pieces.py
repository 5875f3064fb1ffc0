"""Pieces of long prompts in the serving loop."""

from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.plan.pieces import PieceSizes
from overspill.serve.blocks import BlockPool
from overspill.serve.loop import ServingLoop
from overspill.serve.request import Request
from overspill.serve.scheduler import BatchItem, Scheduler
from tests.serve.fake_runner import FakeRunner, greedy
from tests.serve.requests import make_request


class SmallMemory(FakeRunner):
    """A runner that cannot compute more than `most` tokens in a batch, but does not know it. Each
    time it gives memory, of which there is for `gives` times, it can compute one more."""

    def __init__(self, most: int, gives: int = 0) -> None:
        super().__init__(64, 4)
        self.most = most
        self.gives = gives
        self.sizes: list[int] = []

    def room(self) -> int:
        return 1000

    def free_memory(self) -> bool:
        self.gives -= 1
        self.most += self.gives >= 0
        return self.gives >= 0

    def run(self, batch: Sequence[BatchItem]) -> Tensor:
        size = sum(count for _, count in batch)
        if size > self.most:
            raise torch.OutOfMemoryError("injected")
        self.sizes.append(size)
        return super().run(batch)


def grown(least: int, times: int) -> PieceSizes:
    """Sizes that have grown because larger pieces were as fast."""
    pieces = PieceSizes(least)
    for _ in range(times + 1):
        pieces.record(pieces.size(1000), 1.0)
    return pieces


def serve(runner: FakeRunner, pieces: PieceSizes, prompt: list[int]) -> Request:
    loop = ServingLoop(runner, Scheduler(BlockPool(64, 4), 4, chunk=8), [], pieces=pieces)
    request = make_request(prompt, max_tokens=3)
    loop.add(request)
    loop.run_until(lambda: request.finished)
    return request


def test_a_piece_that_does_not_fit_is_computed_in_smaller_ones() -> None:
    runner = SmallMemory(20)
    prompt = [n % 5 for n in range(100)]
    pieces = grown(4, 3)
    assert pieces.size(1000) > 64
    assert serve(runner, pieces, prompt).new_tokens == greedy(prompt, 3)
    assert max(runner.sizes) <= 20
    assert sum(runner.sizes) >= 100
    assert len(runner.sizes) < 20, "not in the smallest ones"


def test_memory_is_given_if_the_smallest_piece_does_not_fit() -> None:
    runner = SmallMemory(2, gives=5)
    prompt = [n % 5 for n in range(30)]
    assert serve(runner, grown(4, 2), prompt).new_tokens == greedy(prompt, 3)
    assert runner.gives == 3


def test_a_batch_that_cannot_fit_fails_its_request() -> None:
    request = serve(SmallMemory(2), grown(4, 2), [1, 2, 3, 4, 0])
    assert isinstance(request.error, torch.OutOfMemoryError)


def test_full_pieces_of_a_prompt_are_measured() -> None:
    runner = SmallMemory(1000)
    pieces = PieceSizes(4)
    prompt = [n % 5 for n in range(60)]
    serve(runner, pieces, prompt)
    assert runner.sizes[:2] == [4, 4], "the first one may compile kernels"
    assert runner.sizes[2] == 16


def test_pieces_become_smaller_than_at_first_if_memory_is_short() -> None:
    runner = SmallMemory(20)
    prompt = [n % 5 for n in range(100)]
    assert serve(runner, PieceSizes(64), prompt).new_tokens == greedy(prompt, 3)
    assert max(runner.sizes) <= 20


def test_a_prompt_that_does_not_fit_ends_no_answer() -> None:
    runner = SmallMemory(3)
    loop = ServingLoop(runner, Scheduler(BlockPool(64, 4), 4, chunk=8), [], pieces=PieceSizes(8))
    answer = make_request([1, 2], max_tokens=20)
    loop.add(answer)
    loop.run_until(lambda: len(answer.new_tokens) > 2)
    prompt = make_request([n % 5 for n in range(30)], max_tokens=3)
    loop.add(prompt)
    loop.run_until(lambda: answer.finished and prompt.finished)
    assert isinstance(prompt.error, torch.OutOfMemoryError)
    assert answer.new_tokens == greedy([1, 2], 20)
