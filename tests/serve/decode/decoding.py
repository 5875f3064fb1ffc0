"""Requests that fused steps decode, compared with the plain model."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from overspill import Settings
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.serve.blocks import BlockPool
from overspill.serve.loop import ServingLoop
from overspill.serve.options import DecodingOptions
from overspill.serve.request import Request
from overspill.serve.runners import PagedRunner
from overspill.serve.scheduler import BatchItem, Scheduler
from tests.models.huggingface.oracle import offloaded
from tests.serve.models import PROMPTS
from tests.serve.requests import make_request

if TYPE_CHECKING:
    from overspill.serve.fused_runner import FusedRunner

INTERPRETED = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/serve/test_gpu.py is for a GPU"),
]

CPU = torch.device("cpu")

GATED = GPTConfig(
    vocab=48, n_layers=2, d_model=16, d_hidden=20, n_heads=2, n_experts=4, top_k=2, gated=True,
    moe_every=2, max_seq=64, tie_embeddings=False, normalize_weights=False,
)  # fmt: skip

BLOCKS, SIZE = 20, 16


def fused_runner(*args: Any) -> "FusedRunner":
    """A runner whose import needs Triton."""
    from overspill.serve.fused_runner import FusedRunner

    return FusedRunner(*args)


class Decoding:
    """Requests of an offloaded model, which get the likeliest tokens of the plain one."""

    def __init__(
        self,
        plain: Any,
        model: Any,
        prompts: Sequence[list[int]] = PROMPTS[:3],
        slots: int = 0,
        mode: str = "auto",
        **options: Any,
    ) -> None:
        self.plain, self.model = plain, model
        limits = BLOCKS, SIZE, 64, 4
        decoding = DecodingOptions(slots=slots, mode=mode, **options)
        self.runner = fused_runner(model, CPU, *limits, decoding)
        self._scheduler = Scheduler(BlockPool(BLOCKS, SIZE), 4, 64)
        self.requests = [make_request(prompt, 30) for prompt in prompts]
        for request in self.requests:
            self._scheduler.add(request)
        self.step()  # the prompts

    def step(self) -> list[BatchItem]:
        """One batch, whose logits are those of the plain model."""
        batch = self._scheduler.next_batch()
        with torch.inference_mode():
            logits = self.runner.run(batch)
        self.check(logits)
        self._append(batch, logits)
        return batch

    def two_steps(self) -> None:
        """The second begins before the first one's tokens are known."""
        batch = self._scheduler.next_batch()
        with torch.inference_mode():
            first = self.runner.run(batch).clone()
            assert self._scheduler.reserve_next(self.requests)
            second = self.runner.continue_with(batch, first.argmax(-1))
        for logits in (first, second):
            assert logits is not None
            self.check(logits)
            self._append(batch, logits)

    def check(self, logits: Tensor) -> None:
        for request, row in zip(self.requests, logits, strict=True):
            with torch.no_grad():
                expected = self.plain(torch.tensor([request.tokens])).logits[0, -1]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=2e-5)

    def _append(self, batch: Sequence[BatchItem], logits: Tensor) -> None:
        for work, row in zip(batch, logits, strict=True):
            self._scheduler.computed(work)
            work.request.tokens.append(int(row.argmax()))


@contextmanager
def decoding(
    plain: Any,
    folder: Path,
    mode: str = "gpu",
    residents: Sequence[int] | None = None,
    prompts: Sequence[list[int]] = PROMPTS[:3],
    settings: Settings | None = None,
    slots: int = 0,
) -> Iterator[Decoding]:
    with offloaded(plain, mode, folder, settings) as model:
        if residents is not None:
            model.overspill.set_residents(residents)
        made = Decoding(plain, model, prompts, slots)
        try:
            yield made
        finally:
            made.runner.close()


def gpt(config: GPTConfig) -> GPTMoE:
    """Weights are large enough that routing and tokens vary."""
    model = GPTMoE(config, checkpoint=False, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return model


def small(prompts: Sequence[list[int]]) -> list[list[int]]:
    return [[token % 48 for token in prompt] for prompt in prompts]


def serve(runner: PagedRunner, requests: Sequence[Request]) -> ServingLoop:
    pool = BlockPool(BLOCKS, SIZE)
    loop = ServingLoop(runner, Scheduler(pool, 4, 64), ends=[])
    for request in requests:
        loop.add(request)
    loop.run_until(lambda: all(request.finished for request in requests))
    pool.check_conserved()
    assert pool.n_free == BLOCKS
    return loop
