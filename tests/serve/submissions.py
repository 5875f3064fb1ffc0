"""What tests of `LLM.submit` share: recorded pieces, batches that wait, and small caches."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from overspill import LLM, SamplingParams
from overspill.serve.background import Submission
from overspill.serve.params import Piece
from overspill.serve.source import CacheRequest
from tests.serve.models import served_gpt
from tests.waiting import wait_until

LONG = SamplingParams(max_tokens=24)
SHORT = SamplingParams(max_tokens=4)


class Pieces:
    """A callback that keeps what it gets."""

    def __init__(self) -> None:
        self.all: list[Piece] = []
        self.ended = threading.Event()

    def __call__(self, piece: Piece) -> None:
        assert not self.ended.is_set(), "a piece after the last one"
        self.all.append(piece)
        if piece.finish_reason is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.all for token in piece.token_ids]


class Gate:
    """Batches of a GPT-MoE wait until they are let through."""

    def __init__(self, llm: LLM) -> None:
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._open = False
        self._hook = llm.model.embedding.register_forward_pre_hook(self._wait)

    def _wait(self, *_: object) -> None:
        if self._open:
            return
        self._arrived.release()
        assert self._permits.acquire(timeout=60)

    def wait_for_batch(self) -> None:
        """Until a batch is there, which is not let through yet."""
        assert self._arrived.acquire(timeout=60)

    def let_through(self, batches: int = 1) -> None:
        """Lets the batch that is there through, and waits for the next, so many times."""
        for _ in range(batches):
            self._permits.release()
            self.wait_for_batch()

    def open(self) -> None:
        self._open = True
        self._hook.remove()
        self._permits.release()


@contextmanager
def gated(llm: LLM) -> Iterator[Gate]:
    gate = Gate(llm)
    try:
        yield gate
    finally:
        gate.open()


@contextmanager
def slow_batches(llm: LLM) -> Iterator[None]:
    """Answers take seconds: what a test does meanwhile comes before their end."""
    hook = llm.model.get_input_embeddings().register_forward_pre_hook(lambda *_: time.sleep(0.05))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def small_cache(blocks: int) -> Iterator[None]:
    """Each LLM that is made has so many blocks of 16 tokens."""
    with patch.object(CacheRequest, "blocks", lambda *_: blocks):
        yield


@contextmanager
def served_tight(blocks: int, folder: Path, **options: Any) -> Iterator[LLM]:
    with small_cache(blocks), served_gpt("gpu", folder, **options) as llm:
        assert llm.stats()["kv_blocks"] == blocks
        yield llm


def wait_until_idle(llm: LLM) -> None:
    """A result is there shortly before its blocks are free."""
    wait_until(lambda: _is_idle(llm))


def _is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    free = stats["kv_blocks_free"] == stats["kv_blocks"]
    return bool(free and stats["running"] == stats["waiting"] == 0)


def tokens_of_submission(submission: Submission) -> list[int]:
    return submission.result(timeout=60).token_ids
