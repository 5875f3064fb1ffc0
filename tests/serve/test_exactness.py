"""Greedy tokens against transformers' `generate`, for any model, tier and batch."""

import copy
import dataclasses
from functools import partial
from itertools import product
from pathlib import Path

import pytest

import overspill
from overspill import LLM, SamplingParams, Settings
from tests.models.huggingface.families import FAMILIES, Family, different_cases, make_model, tiny
from tests.models.huggingface.oracle import MODES
from tests.moe.oracle import delays
from tests.serve.models import (
    GREEDY,
    N_NEW,
    PROMPTS,
    family,
    gpt_tokens,
    plain_generate,
    plain_model,
    served,
    served_gpt,
    tokens_of,
)
from tests.slow import slow_rows

REFUSED = {"aria_text"}  # its experts do not use transformers' interface
DECODERS = [
    family
    for family in FAMILIES
    if family.auto == "AutoModelForCausalLM" and family.name not in REFUSED
]
# grouped attention, sinks and windows, shared experts, recurrent states
FOUR = ["mixtral", "gpt_oss", "qwen2_moe", "jamba"]


@pytest.mark.parametrize("family", different_cases(DECODERS, "granitemoe", "phimoe", "qwen2_moe"))
def test_tokens_are_those_of_transformers(family: Family) -> None:
    model = make_model(family).eval()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    prompts = PROMPTS[1:]
    expected = [plain_generate(model, prompt, params.max_tokens) for prompt in prompts]
    overspill.offload(model, device="cpu", mode="host", slots=4, quiet=True)
    with LLM(model, context=64, max_batch=2) as llm:  # one waits for another
        assert tokens_of(llm, prompts, params) == expected
    model.overspill.close()


def test_windows_that_are_in_the_mask_only_are_followed() -> None:
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    family = Family("qwen2_moe", partial(tiny, "qwen2_moe", **window))
    assert "sliding_attention" in family.build().layer_types
    test_tokens_are_those_of_transformers(family)


def _long_rope(short: float, long: float) -> Family:
    """The second scale is for sequences of more than 16 tokens."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [1.5] * 4,
        "short_mscale": short, "long_mscale": long,
    }  # fmt: skip
    return Family("phimoe", partial(tiny, "phimoe", intermediate_size=24, rope_parameters=rope))


def test_phimoe_follows_a_window_and_one_scale_of_rotary_embeddings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert _long_rope(1.2, 1.2).build().sliding_window == 6
    test_tokens_are_those_of_transformers(_long_rope(1.2, 1.2))
    assert "one request after another" not in caplog.text


@pytest.mark.parametrize("name", ["phimoe", "minimax", "deepseek_v4"])
def test_a_model_that_is_not_batched_is_named_once_with_the_reason(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = {
        "phimoe": "PhimoeForCausalLM computes one request after another: its rotary embeddings "
        "(longrope) change with the length of a sequence",
        "minimax": "MiniMaxForCausalLM computes one request after another: with sliding_window, "
        "MiniMax computes otherwise with its own cache than without",
        "deepseek_v4": "DeepseekV4ForCausalLM computes one request after another: its layers "
        "(compressed_sparse_attention) keep more than keys and values",
    }
    made = _long_rope(1.2, 1.3) if name == "phimoe" else family(name)
    if name == "deepseek_v4":
        layers = ["sliding_attention", "compressed_sparse_attention"]
        made = dataclasses.replace(made, build=partial(made.build, layer_types=layers))
    model = overspill.offload(make_model(made).eval(), device="cpu", mode="host", quiet=True)
    with LLM(model, context=64) as llm:
        assert tokens_of(llm, PROMPTS[:2])
    model.overspill.close()
    assert [each.message for each in caplog.records if "after another" in each.message] == [
        reasons[name]
    ]


@pytest.mark.parametrize(
    ("name", "mode"),
    slow_rows(
        [*zip(FOUR, ["disk", "gpu"] * 2, strict=True), *product(["mixtral", "jamba"], ["host"])],
        2,
        3,
        4,
    ),
)
def test_tokens_do_not_depend_on_tier_batch_and_delays(
    name: str, mode: str, tmp_path: Path
) -> None:
    _, expected = plain_model(name)
    late = Settings(inject=delays(seed=5, longest=5e-4))
    with served(name, mode, tmp_path, late) as llm:
        assert tokens_of(llm, PROMPTS) == expected, "together"
        assert [tokens_of(llm, [prompt])[0] for prompt in PROMPTS] == expected, "alone"


@pytest.mark.parametrize("mode", slow_rows(MODES, 0))
def test_gpt_moe_generates_its_own_tokens(mode: str, tmp_path: Path) -> None:
    prompts = [[3, 1, 4, 1, 5], [9], list(range(2, 30))]
    with served_gpt(mode, tmp_path, Settings(inject=delays(seed=5, longest=5e-4))) as llm:
        params = SamplingParams(max_tokens=10)
        assert tokens_of(llm, prompts, params) == [gpt_tokens(prompt, 10) for prompt in prompts]


RECURRENT = ["jamba", "qwen3_next", "lfm2_moe", "nemotron_h"]


@pytest.mark.parametrize("name", slow_rows(RECURRENT, 2, 3))
def test_long_prompts_beside_each_other_of_models_with_states(name: str, tmp_path: Path) -> None:
    """Together they are longer than the context."""
    model, _ = plain_model(name)
    prompts = [[(7 * n) % 90 + 3 for n in range(length)] for length in (40, 41, 30)]
    expected = [plain_generate(model, prompt, 3) for prompt in prompts]
    with served(name, "host", tmp_path) as llm:
        assert tokens_of(llm, prompts, SamplingParams(max_tokens=3, ignore_eos=True)) == expected


@pytest.mark.parametrize("name", slow_rows(["mixtral", "gpt_oss"], 0))
def test_a_prompt_in_parts_gives_the_tokens_of_the_whole(name: str, tmp_path: Path) -> None:
    _, expected = plain_model(name)
    with served(name, "host", tmp_path, prefill_chunk=7) as llm:
        assert tokens_of(llm, PROMPTS) == expected


@pytest.mark.parametrize("name", slow_rows(["mixtral", "minimax", "jamba"], 0, 1))
def test_requests_that_give_their_blocks_back_get_the_same_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for one context: three requests that grow do not fit."""
    monkeypatch.setattr("overspill.serve.source.CacheRequest.blocks", lambda *_: 4)
    monkeypatch.setattr("overspill.serve.llm._BLOCK", 4)
    model, _ = plain_model(name)
    prompts = [[4, 5, 6], [7, 8], [9, 3, 11, 40]]
    expected = [plain_generate(model, prompt, 9) for prompt in prompts]
    with served(name, "host", tmp_path, context=16) as llm:
        preempt = _count_calls(llm, monkeypatch)
        assert tokens_of(llm, prompts, SamplingParams(max_tokens=9, ignore_eos=True)) == expected
        assert preempt


def _count_calls(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    scheduler, calls = llm._loop.scheduler, []
    preempt = scheduler._preempt
    monkeypatch.setattr(
        scheduler, "_preempt", lambda request: (calls.append(request), preempt(request))
    )
    return calls


def test_a_shared_beginning_is_computed_once_and_gives_the_same_tokens(tmp_path: Path) -> None:
    _, expected = plain_model("mixtral")
    with served("mixtral", "host", tmp_path) as llm:
        assert tokens_of(llm, [PROMPTS[2]]) == [expected[2]]
        assert llm.stats()["prompt_tokens"] == 20
        assert tokens_of(llm, [PROMPTS[3]]) == [expected[3]]
        assert llm.stats()["prompt_tokens"] == 20 + 19 - 16
        assert tokens_of(llm, [PROMPTS[2]]) == [expected[2]]
        assert llm.stats()["prompt_tokens"] == 23 + 20 - 16


def test_tokens_that_were_generated_are_shared_with_the_next_prompt(tmp_path: Path) -> None:
    """As in a chat."""
    with served("mixtral", "host", tmp_path) as llm:
        (first,) = tokens_of(llm, [PROMPTS[0]], SamplingParams(max_tokens=24, ignore_eos=True))
        before = llm.stats()["prompt_tokens"]
        following = [*PROMPTS[0], *first, 5, 6, 7]
        assert tokens_of(llm, [following]) == [plain_generate(plain_model("mixtral")[0], following)]
        assert llm.stats()["prompt_tokens"] - before == len(following) - 32


def test_a_given_model_works_as_before_after_close(tmp_path: Path) -> None:
    for name in ("mixtral", "jamba"):
        model, expected = plain_model(name)
        twin = overspill.offload(copy.deepcopy(model), device="cpu", mode="gpu", quiet=True)
        with LLM(twin, context=64) as llm:
            assert tokens_of(llm, PROMPTS) == expected
        assert twin.config._attn_implementation == model.config._attn_implementation
        assert [plain_generate(twin, prompt) for prompt in PROMPTS] == expected
        with LLM(twin, context=64) as llm:  # and can be served again
            assert tokens_of(llm, PROMPTS) == expected
        twin.overspill.close()


def test_the_end_of_the_text_ends_a_request_as_in_transformers(tmp_path: Path) -> None:
    _, expected = plain_model("mixtral")
    with served("mixtral", "gpu", tmp_path) as llm:
        end = expected[0][3]
        llm.model.generation_config.eos_token_id = [95, end]
        with LLM(copy_of_given(llm), context=64) as other:
            result = other.generate(PROMPTS[0], SamplingParams(max_tokens=N_NEW))[0]
            until = expected[0][: expected[0].index(end) + 1]
            assert (result.token_ids, result.finish_reason) == (until, "stop")
            again = other.generate(PROMPTS[0], GREEDY)[0]
            assert (again.token_ids, again.finish_reason) == (expected[0], "length")


def copy_of_given(llm: LLM) -> object:
    llm.close()
    return llm.model
