"""Requests of models with states that continue from those of others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.models.huggingface.recurrent import state_bytes
from overspill.serve import source
from overspill.serve.checkpoints import Checkpoints
from tests.models.huggingface.oracle import offloaded
from tests.serve.models import plain_generate
from tests.serve.test_states import STATEFUL, plain_model
from tests.slow import slow_names, slow_rows

TEXT = [7 + 5 * number % 83 for number in range(60)]


def greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)


def check_greedy(plain: Any, tokens: Sequence[int], n_new: int) -> None:
    """The last tokens are the likeliest ones of the plain model."""
    with torch.no_grad():
        logits = plain(torch.tensor([tokens[:-1]])).logits[0, -n_new:]
    assert logits.argmax(-1).tolist() == list(tokens[-n_new:])


@contextmanager
def sharing(name: str, folder: Path, **options: Any) -> Iterator[tuple[Any, LLM, Checkpoints]]:
    """A model that keeps states of each block of an answer."""
    plain, _ = plain_model(name)
    with (
        offloaded(plain, "host", folder) as model,
        LLM(model, **{"context": 64, "max_batch": 3, **options}) as llm,
    ):
        checkpoints = llm._loop.scheduler.pool.checkpoints
        assert checkpoints is not None
        checkpoints.answer_blocks = 1
        yield plain, llm, checkpoints
    assert not checkpoints


def cached(plain: Any, llm: LLM, prompts: Sequence[Sequence[int]], n: int = 3) -> list[int]:
    """The cached tokens of each prompt, after a look at the answers."""
    results = llm.generate([list(prompt) for prompt in prompts], greedy(n))
    for prompt, result in zip(prompts, results, strict=True):
        check_greedy(plain, [*prompt, *result.token_ids], n)
    return [result.cached_tokens for result in results]


@pytest.mark.parametrize("name", slow_names(STATEFUL, *{*STATEFUL} - {"nemotron_h"}))
def test_answers_after_a_shared_beginning_are_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    with sharing(name, tmp_path) as (plain, llm, checkpoints):
        assert cached(plain, llm, [TEXT[:40]]) == [0]
        # up to the last full block of the first one, which leaves a token to compute
        for end, found in [(32, 0), (33, 32), (34, 32), (40, 32)]:
            assert cached(plain, llm, [[*TEXT[:end], 1, 2][: end + (end > 33)]]) == [found]
        # a beginning that others had too gets states, and the next request finds them
        assert cached(plain, llm, [[*TEXT[:20], 3], [*TEXT[:20], 4, 5]]) == [16, 16]
        assert cached(plain, llm, [TEXT[30:55], [*TEXT[30:55], 1]]) == [0, 0], "at the same time"
        assert cached(plain, llm, [[*TEXT[30:46], 1], [*TEXT[31:47], 1], TEXT]) == [16, 0, 32]
        chat, found = TEXT[50:], []
        for turn in range(3):
            chat = [*chat, turn + 8, 9]
            (result,) = llm.generate([chat], greedy(12))
            chat += result.token_ids
            check_greedy(plain, chat, 12)
            found.append(result.cached_tokens)
        assert found == [0, 16, 32]
        stats = llm.stats()
        assert stats["checkpoints"] == len(checkpoints) > 3
        assert stats["checkpoint_bytes"] == len(checkpoints) * state_bytes(plain)
        asked = plain_generate(plain, TEXT[:33], 3)
        before = llm.stats()["prompt_tokens"]
        assert llm.generate([TEXT[:33]], greedy(3))[0].token_ids == asked
        assert llm.stats()["prompt_tokens"] - before <= 1, "the rest is not computed again"


@pytest.mark.parametrize("piece", slow_rows([None, 20, 7], 1, 2))
def test_a_second_prompt_continues_within_the_first_one(piece: int | None, tmp_path: Path) -> None:
    """Its beginning ends inside the piece of a prompt that another request has computed."""
    with sharing("lfm2_moe", tmp_path, prefill_chunk=piece) as (plain, llm, checkpoints):
        checkpoints.prompt_blocks = 2
        assert cached(plain, llm, [TEXT[:56]]) == [0]
        assert cached(plain, llm, [[*TEXT[:40], 1, 2, 3]]) == [32]
        assert cached(plain, llm, [[*TEXT[:32], 4]]) == [32]


@pytest.mark.parametrize("piece", slow_rows([7, 1, 20], 1, 2))
def test_prompts_in_pieces_beside_others(piece: int, tmp_path: Path) -> None:
    with sharing("lfm2_moe", tmp_path, prefill_chunk=piece) as (plain, llm, _):
        prompts = [TEXT[:50], [*TEXT[:40], 1], [*TEXT[:33], 2], TEXT[20:60]]
        for _ in range(2):
            found = cached(plain, llm, prompts, 5)
        assert found[1:3] == [32, 32]
        assert found[0] == 48


def test_a_full_store_gives_up_the_oldest_states(tmp_path: Path) -> None:
    with sharing("lfm2_moe", tmp_path) as (plain, llm, checkpoints):
        checkpoints.limit = state_bytes(plain)
        for start in (0, 5, 0, 5, 5):
            found = cached(plain, llm, [TEXT[start : start + 40]])
            assert len(checkpoints) == 1
        assert found == [32]
        checkpoints.limit = state_bytes(plain) - 1
        assert cached(plain, llm, [TEXT[2:40]] * 2) == [0, 0]


@pytest.mark.parametrize("name", slow_names(STATEFUL, *{*STATEFUL} - {"qwen3_next"}))
def test_a_request_that_gave_its_blocks_back_continues_from_a_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are blocks for one and a half requests of this length."""
    blocks = source.CacheRequest.blocks
    monkeypatch.setattr(source.CacheRequest, "blocks", lambda *args: blocks(*args) // 2)
    with sharing(name, tmp_path) as (plain, llm, _):
        begun = []
        resume = llm._loop.runner._slots.resume  # type: ignore[attr-defined]
        monkeypatch.setattr(
            llm._loop.runner._slots,  # type: ignore[attr-defined]
            "resume",
            lambda request: (begun.append(request.computed), resume(request))[1],
        )
        assert cached(plain, llm, [TEXT[:20], TEXT[10:31], TEXT[20:38]], 30) == [0, 0, 0]
        assert begun


def test_states_of_other_weights_are_forgotten(tmp_path: Path) -> None:
    with sharing("lfm2_moe", tmp_path) as (_, llm, checkpoints):
        assert [*llm.generate([TEXT[:40]] * 2, greedy(2))][1].cached_tokens == 0
        assert llm.generate([TEXT[:40]], greedy(2))[0].cached_tokens == 32
        with torch.no_grad():
            llm.model.lm_head.weight.neg_()
        (result,) = llm.generate([TEXT[:40]], greedy(2))
        assert result.cached_tokens == 0
        assert result.token_ids == plain_generate(llm.model, TEXT[:40], 2)
        assert len(checkpoints) == 1
        llm.reset_prefix_cache()
        assert llm.generate([TEXT[:40]], greedy(2))[0].cached_tokens == 0
