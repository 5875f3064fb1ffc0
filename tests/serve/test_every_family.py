"""Each family with states, sparse attention or attention of its own, in all ways in which requests
are batched. test_states.py and test_sparse.py look at each of these closely."""

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

import overspill
from overspill import LLM, SamplingParams
from overspill.models.pregate import pregate_level
from overspill.serve import source
from overspill.serve.runners import PagedRunner
from tests.models.huggingface.adapters import save_adapter
from tests.models.huggingface.families import EXPERT, Family, make_model
from tests.models.huggingface.oracle import offloaded
from tests.models.huggingface.test_expert_lora import BOTH
from tests.serve.models import family
from tests.serve.test_checkpoints import check_greedy, greedy
from tests.serve.test_exactness import _long_rope
from tests.serve.test_sparse import SPARSE
from tests.serve.test_states import NESTED, STATEFUL, make_plain
from tests.serve.test_text import byte_level
from tests.slow import slow_names
from tests.waiting import wait_until

NAMES = [*STATEFUL, *SPARSE, "phimoe"]
PIECES = [1, 2, 3, 4, 5, 64]
TEXT = [7 + 5 * number % 83 for number in range(16)]


@functools.cache
def plain_model(name: str) -> Any:
    return make_model(_long_rope(1.2, 1.2)).eval() if name == "phimoe" else make_plain(name)


@pytest.mark.parametrize("name", NAMES)
def test_batches_pieces_shared_beginnings_preemption_and_cancellation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are blocks for one request and a half, of 4 tokens each."""
    monkeypatch.setattr(source.CacheRequest, "blocks", lambda *_: 5)
    monkeypatch.setattr("overspill.serve.llm._BLOCK", 4)
    plain, piece = plain_model(name), PIECES[NAMES.index(name) % len(PIECES)]
    with (
        offloaded(plain, "host", tmp_path) as model,
        LLM(model, context=16, max_batch=3, prefill_chunk=piece) as llm,
    ):
        loop = llm._loop
        runner, scheduler = loop.runner, loop.scheduler
        assert isinstance(runner, PagedRunner)
        together, longest, given_back = note(runner, scheduler, monkeypatch)
        # the second one has a beginning in common with the first: up to an edge of a block
        prompts = [TEXT[:6], [*TEXT[:4], 3], TEXT[9:11]]
        for prompt, result in zip(prompts, llm.generate(prompts, greedy(8)), strict=True):
            check_greedy(plain, [*prompt, *result.token_ids], 8)
        assert max(together) > 1, "one pass computes several requests"
        assert min(piece, 6) // 2 < max(longest) <= piece
        assert given_back
        cancelled = llm.submit(TEXT[:6], SamplingParams(max_tokens=10, ignore_eos=True))
        wait_until(lambda: bool(scheduler.running))
        cancelled.cancel()
        wait_until(lambda: not scheduler.running)
        llm.reset_prefix_cache()
        cached = []
        for prompt in (TEXT[:9], TEXT[:9], [*TEXT[:8], 3], [*TEXT[:9], 3], [*TEXT[:7], 3]):
            (result,) = llm.generate([prompt], greedy(2))
            check_greedy(plain, [*prompt, *result.token_ids], 2)
            cached.append(result.cached_tokens)
        assert cached[:4] == [0, 8, 8, 8]
        # a state after the first block is kept if a piece ends there
        assert cached[4] == 4 or (cached[4] == 0 and name in STATEFUL)
        scheduler.pool.check_conserved()
        assert scheduler.pool.n_free == 5
        assert runner._slots is None or not runner._slots._slots


def note(
    runner: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[int], list[Any]]:
    """How many requests each pass has, the tokens of the longest piece, and the requests that give
    their blocks back."""
    together: list[int] = []
    longest: list[int] = []
    given_back: list[Any] = []
    compute, preempt = runner._compute, scheduler._preempt

    def computed(parts: Any, keep: bool = True) -> Any:
        together.append(len(parts))
        longest.append(max(part.n_new for part in parts))
        return compute(parts, keep)

    def preempted(request: Any) -> None:
        given_back.append(request)
        preempt(request)

    monkeypatch.setattr(runner, "_compute", computed)
    monkeypatch.setattr(scheduler, "_preempt", preempted)
    return together, longest, given_back


def changed(name: str, **others: Any) -> Family:
    """The family with rows of experts that formats of 4 bits divide into groups."""
    made = _long_rope(1.2, 1.2) if name == "phimoe" else family(name)
    assert name != NESTED
    assert isinstance(made.build, functools.partial)
    others |= {field: 32 for field in ("moe_latent_size",) if field in made.build.keywords}
    is_common = made.build.keywords.get("intermediate_size") != EXPERT
    others["moe_intermediate_size" if is_common else "intermediate_size"] = 32
    others |= {"sliding_window": None} if name == "minimax" else {}
    return dataclasses.replace(made, build=functools.partial(made.build, **others))


OTHERS = [name for name in NAMES if name != NESTED]


@pytest.mark.parametrize(
    "name", slow_names(OTHERS, *{*OTHERS} - {"qwen3_5_moe_text", "nemotron_h", "zaya", "axk2"})
)
def test_pre_gates_adapters_and_packed_experts_together(name: str, tmp_path: Path) -> None:
    model = make_model(changed(name)).eval()
    save_adapter(copy.deepcopy(model), tmp_path, tmp_path / "base", **BOTH)
    if name != "zaya":  # its routers need more than the hidden states of their block
        overspill.pregate(model)
    overspill.save(model, tmp_path / "base")
    given = {"adapter": tmp_path / "adapter", "quantize": "mxfp4", "dtype": "float32"}
    with LLM(tmp_path / "base", device="cpu", context=64, prefill_chunk=7, **given) as llm:
        assert isinstance(llm._loop.runner, PagedRunner)
        assert pregate_level(llm.model) == (name != "zaya")
        layout = llm.model.overspill.layout
        assert layout.format is not None
        assert layout.ranks == (3, 3)
        model.load_state_dict(llm.model.state_dict())
        prompts = [TEXT[:9], TEXT[3:5], [*TEXT, *TEXT[:3]]]
        for prompt, result in zip(prompts, llm.generate(prompts, greedy(4)), strict=True):
            check_greedy(model, [*prompt, *result.token_ids], 4)


@pytest.mark.parametrize("name", slow_names(OTHERS, *{*OTHERS} - {"qwen3_next"}))
def test_several_requests_with_schemas(name: str, tmp_path: Path) -> None:
    """Beside each other they get the answers that they get alone."""
    make_model(changed(name, vocab_size=260, max_position_embeddings=128)).save_pretrained(tmp_path)
    byte_level().tokenizer.save_pretrained(tmp_path)
    schema = {"type": "array", "items": {"enum": ["ab", 31]}, "minItems": 2, "maxItems": 3}
    params = [
        SamplingParams(max_tokens=40, json_schema=schema, temperature=1.0, seed=1),
        SamplingParams(max_tokens=4, temperature=0.0),
        SamplingParams(max_tokens=40, json_schema=schema, temperature=0.0),
    ]
    with LLM(tmp_path, device="cpu", context=96, dtype="float32") as llm:
        texts = ["a long prompt, ", "a", "a long prompt: "]
        together = llm.generate(texts, params)
        assert [llm.generate(*each)[0].text for each in zip(texts, params, strict=True)] == [
            result.text for result in together
        ]
        for result in (together[0], together[2]):
            assert result.finish_reason == "stop"
            assert {*json.loads(result.text)} <= {"ab", 31}
