"""Models with states beside keys and values: answers are those of transformers, in any batch."""

import copy
import dataclasses
import functools
import random
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.core.errors import DiskError
from overspill.models.huggingface.recurrent import TYPES, pin_copies, state_bytes
from overspill.serve import runners, source
from overspill.serve.runners import PagedRunner
from tests.models.huggingface.families import FAMILIES, make_model
from tests.models.huggingface.oracle import offloaded
from tests.serve.models import PROMPTS, family, plain_generate, tokens_of
from tests.slow import slow_names, slow_rows

NESTED, SAME = "qwen3_5_moe", "qwen3_5_moe_text"  # the first has the second as a part
STATEFUL = [family.name for family in FAMILIES if family.name in {*TYPES, NESTED}]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@functools.cache
def plain_model(name: str) -> tuple[Any, list[list[int]]]:
    """A model of the family, and its greedy tokens after `PROMPTS`."""
    model = make_plain(name)
    return model, [plain_generate(model, prompt, 6) for prompt in PROMPTS]


PLAIN: dict[str, dict[str, Any]] = {
    "minimax": {"sliding_window": None},
    # its modules limit the time steps of prompts, but not those of answers
    "nemotron_h": {"time_step_min": 1e-9},
}


def make_plain(name: str) -> Any:
    """A model of the family whose requests can be batched, and which computes an answer as a
    prompt."""
    options = PLAIN.get(name, {})
    made = family(name)
    made = dataclasses.replace(made, build=functools.partial(made.build, **options))
    return make_model(made).eval()


@pytest.mark.parametrize(
    ("piece", "name"),
    slow_rows(
        [*product([7, 1, 64], STATEFUL)],
        STATEFUL.index(SAME),
        *range(len(STATEFUL), 3 * len(STATEFUL)),
    ),
)
def test_answers_in_batches_are_those_of_transformers(
    name: str, piece: int, tmp_path: Path
) -> None:
    """Prompts in pieces, beside answers that have begun."""
    plain, expected = plain_model(name)
    with (
        offloaded(plain, "host", tmp_path) as model,
        LLM(model, context=64, max_batch=3, prefill_chunk=piece) as llm,
    ):
        assert isinstance(llm._loop.runner, PagedRunner)
        assert tokens_of(llm, PROMPTS, GREEDY) == expected, "together"
        assert tokens_of(llm, PROMPTS[:1], GREEDY) == expected[:1], "alone"
        assert not llm._loop.runner._slots._slots  # type: ignore[union-attr]


@pytest.mark.parametrize("name", slow_names(STATEFUL, *{*STATEFUL} - {"qwen3_next"}))
def test_a_request_that_gave_its_blocks_back_has_the_same_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are blocks for one request of this length."""
    blocks = source.CacheRequest.blocks
    monkeypatch.setattr(source.CacheRequest, "blocks", lambda *args: blocks(*args) // 3)
    plain, _ = plain_model(name)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    expected = [plain_generate(plain, prompt, 40) for prompt in PROMPTS[:2]]
    with offloaded(plain, "host", tmp_path) as model, LLM(model, context=64, max_batch=3) as llm:
        assert tokens_of(llm, PROMPTS[:2], params) == expected


@pytest.mark.parametrize("name", slow_rows(["qwen3_next", "jamba"], 0))
def test_a_state_that_an_interrupted_pass_has_changed_is_computed_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is lost, and each request is computed alone."""
    plain, expected = plain_model(name)
    with offloaded(plain, "host", tmp_path) as model, LLM(model, context=64) as llm:
        runner, chance = llm._loop.runner, random.Random(4)
        run, lost = runner.run, []

        def interrupted(batch: Any) -> Any:
            logits = run(batch)
            if len(batch) > 1 and chance.random() < 0.5:
                lost.append(batch)
                raise DiskError("a read has failed")
            return logits

        monkeypatch.setattr(runner, "run", interrupted)
        assert tokens_of(llm, PROMPTS, GREEDY) == expected
        assert len(lost) > 2


def test_states_are_computed_again_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that was computed in pieces may not fit into memory at once."""
    plain, expected = plain_model("qwen3_next")
    monkeypatch.setattr(runners, "_PIECE", 6)
    longest: list[int] = []
    lost: list[Any] = []
    with (
        offloaded(plain, "host", tmp_path) as model,
        LLM(model, context=64, prefill_chunk=6, max_batch=2) as llm,
    ):
        runner = llm._loop.runner
        compute, run = runner._compute, runner.run  # type: ignore[attr-defined]

        def note(parts: Any, **options: Any) -> Any:
            longest.append(max(part.n_new for part in parts))
            return compute(parts, **options)

        def interrupted(batch: Any) -> Any:
            logits = run(batch)
            if len(batch) > 1 and not lost:
                lost.append(batch)
                raise DiskError("a read has failed")
            return logits

        monkeypatch.setattr(runner, "_compute", note)
        monkeypatch.setattr(runner, "run", interrupted)
        assert tokens_of(llm, PROMPTS[2:4], GREEDY) == expected[2:4]
    assert lost
    assert max(longest) <= 6


def test_states_and_keys_are_in_the_budget_and_counted(tmp_path: Path) -> None:
    for name in {*STATEFUL} - {SAME}:
        plain, _ = plain_model(name)
        own = state_bytes(plain)
        assert own == state_bytes(copy.deepcopy(plain).to("meta"))
        with mock.patch.object(torch, "empty") as empty:
            pin_copies(plain, 2 * own + own // 2)
        pinned = [(shape, how["dtype"]) for (shape,), how in empty.call_args_list]
        assert sum(shape.numel() * dtype.itemsize for shape, dtype in pinned) == 2 * own
        with offloaded(plain, "gpu", tmp_path) as model, LLM(model, context=64, max_batch=3) as llm:
            assert not llm.stats()["cache_bytes"]
            tokens_of(llm, PROMPTS[:1], SamplingParams(max_tokens=1))
            assert llm._loop.runner._slots.memory.nbytes == 4 * own  # type: ignore[attr-defined]
            slots = (llm._source.n_blocks + 1) * 16
            keys = slots * source._token_bytes(plain, torch.float32)
            assert llm.stats()["cache_bytes"] == keys + 4 * own, name


def test_a_cancelled_request_frees_its_state(tmp_path: Path) -> None:
    plain, expected = plain_model("qwen3_next")
    with offloaded(plain, "host", tmp_path) as model, LLM(model, context=64, max_batch=2) as llm:
        for _ in range(3):
            stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
            next(stream)
            stream.close()
        assert tokens_of(llm, PROMPTS, GREEDY) == expected
        with torch.no_grad():  # states of other weights are void
            model.lm_head.weight.neg_()
        changed = [plain_generate(model, prompt, 6) for prompt in PROMPTS[:2]]
        assert tokens_of(llm, PROMPTS[:2], GREEDY) == changed != expected[:2]


def test_a_module_keeps_a_forward_of_its_own(tmp_path: Path) -> None:
    """Such as that of a profiler: batches call it, and it is there afterwards."""
    plain, expected = plain_model("lfm2_moe")
    with offloaded(plain, "host", tmp_path) as model:
        module = next(m for m in model.modules() if type(m).__name__ == "Lfm2MoeShortConv")
        calls, own = [], module.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return own(*args, **kwargs)

        module.forward = wrapped  # type: ignore[method-assign]
        with LLM(model, context=64) as llm:
            assert tokens_of(llm, PROMPTS, GREEDY) == expected
        assert len(calls) > 1
        assert vars(module)["forward"] is wrapped
