"""Prompts copy experts that decoding keeps on the device from there: the tokens are the same."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill import Settings
from overspill.models.config import GPTConfig
from overspill.serve.decode.cache import ExpertCache
from overspill.serve.fused_runner import FusedRunner
from overspill.serve.options import DecodingOptions
from overspill.transfer.uploader import REPLICAS
from tests.fuzz.late import LateStream
from tests.moe.oracle import delays
from tests.serve.decode.decoding import BLOCKS, CPU, INTERPRETED, SIZE, gpt, serve
from tests.serve.requests import make_request

pytestmark = INTERPRETED
CONFIG = GPTConfig(
    vocab=48, n_layers=3, d_model=16, d_hidden=24, n_heads=1, n_experts=12, top_k=2, max_seq=64
)
POISON = 255
PROMPTS = [[5, 9, 33, 7, 12, 41], [47, 30, 31, 32, 33, 34, 35, 36]]


@contextmanager
def served(plain: Any, folder: Path, settings: Settings, **given: Any) -> Iterator[FusedRunner]:
    """With a cache of a third of the experts."""
    options = {"mode": "host", "slots": 4, "device": "cpu", "quiet": True, "progress": False}
    model = overspill.offload(copy.deepcopy(plain), settings=settings, **{**options, **given})
    runner = FusedRunner(model, CPU, BLOCKS, SIZE, 64, 4, DecodingOptions(slots=12))
    try:
        yield runner
    finally:
        runner.close()
        model.overspill.check_conserved()
        model.overspill.close()


def check_answers(runner: FusedRunner, plain: Any, new: int = 3) -> None:
    """Answers the prompts, and again: the second time experts are in the cache."""
    for _ in range(2):
        for prompt in PROMPTS:
            request = make_request(prompt, new)
            serve(runner, [request])
            assert request.tokens == greedy(plain, prompt, new)


def greedy(plain: Any, prompt: list[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            tokens.append(int(plain(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots that were written to. Before that, their memory has no expert."""
    written: list[int] = []
    begin = ExpertCache._copy

    def poison_first(cache: ExpertCache, planned: list[Any], copies: Any) -> None:
        assert not cache._engine._store.replicas.lent, "uploads may begin to read a slot"
        cache._wait_for_reads()
        for upload in planned:
            cache._record(upload.slot).fill_(POISON)
            written.append(upload.slot)
        begin(cache, planned, copies)

    monkeypatch.setattr(ExpertCache, "_copy", poison_first)
    return written


@pytest.mark.parametrize("uploader", [pytest.param("thread", marks=pytest.mark.slow), "native"])
def test_prompts_upload_less(uploader: str, tmp_path: Path, poisoned: list[int]) -> None:
    plain, bytes_of = gpt(CONFIG), []
    for replicas in (False, True):
        settings = Settings(prompt_replicas=replicas, uploader=uploader)
        with served(plain, tmp_path, settings) as runner:
            check_answers(runner, plain)
            counters = runner._engine.recorder.counters()
            bytes_of.append((counters["upload"], counters.get(REPLICAS, 0)))
    (without, none), (uploaded, copied) = bytes_of
    assert none == 0
    assert copied > 0.1 * without
    assert uploaded < without
    assert len(set(poisoned)) < len(poisoned), "slots were used again"


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_late_copies_read_what_they_should(seed: int, tmp_path: Path, poisoned: list[int]) -> None:
    """Uploads for the next prompt are issued during the steps between, and end later."""
    late, before = LateStream("upload", seed, 3e-3), delays(seed, 2e-2)

    def inject(kind: str) -> Any:
        if kind != "upload":
            return None
        before(kind)
        return late.defer

    settings = Settings(prompt_replicas=True, inject=inject)
    plain = gpt(CONFIG)
    with served(plain, tmp_path, settings) as runner:
        check_answers(runner, plain)
        assert runner._engine.recorder.counters()[REPLICAS] > 0
    late.close()


def test_experts_on_disk_are_not_read_again(tmp_path: Path, poisoned: list[int]) -> None:
    plain, read = gpt(CONFIG), []
    for replicas in (False, True):
        settings = Settings(prompt_replicas=replicas)
        given = {"mode": "disk", "host_slots": 20, "disk": tmp_path / str(replicas)}
        with served(plain, tmp_path, settings, **given) as runner:
            check_answers(runner, plain)
            counters = runner._engine.recorder.counters()
            assert (counters.get(REPLICAS, 0) > 0) == replicas
            read.append(counters["ssd read"])
    assert read[1] < read[0]


def test_weights_that_change_are_uploaded(tmp_path: Path) -> None:
    plain = gpt(CONFIG)
    with served(plain, tmp_path, Settings(prompt_replicas=True)) as runner:
        check_answers(runner, plain)
        engine = runner._engine
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.dim() == 3:
                    parameter.neg_()
        state = plain.state_dict()
        runner._model.load_state_dict(state)
        request = make_request(PROMPTS[0], 1)
        serve(runner, [request])
        assert request.tokens == greedy(plain, PROMPTS[0], 1)
        check_answers(runner, plain)
        assert engine.recorder.counters()[REPLICAS] > 0
