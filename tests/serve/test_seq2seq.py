"""Encoder-decoders: answers are the greedy tokens of transformers, in any batch and place."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill import LLM, SamplingParams, Settings
from overspill.core.errors import BudgetError, ConfigError
from overspill.serve.params import Result
from tests.models.huggingface.oracle import offloaded
from tests.serve.models import tokens_of
from tests.serve.seq2seq import (
    DEEP,
    FAMILIES,
    N_NEW,
    SOURCES,
    expected,
    plain_answer,
    plain_model,
    pregated,
)
from tests.slow import slow_rows

GREEDY = SamplingParams(max_tokens=N_NEW, temperature=0.0, ignore_eos=True)
FIXED = Settings(fix_nllb_routing=True)


@pytest.mark.parametrize(
    ("name", "place"),
    slow_rows([(n, place) for place in ("gpu", "host", "disk") for n in FAMILIES], 0, 3, 4),
)
def test_answers_are_those_of_transformers(name: str, place: str, tmp_path: Path) -> None:
    """Alone and together, with sources of one token and longer than a batch's limit."""
    with offloaded(plain_model(name), place, tmp_path) as model:
        with LLM(model, context=64, max_batch=3, prefill_chunk=16) as llm:
            results = llm.generate(SOURCES, GREEDY)
            assert [each.token_ids for each in results] == expected(name)
            assert [each.prompt_tokens for each in results] == [len(each) for each in SOURCES]
            assert tokens_of(llm, SOURCES[2:3], GREEDY) == expected(name)[2:3]
            stats = llm.stats()
            assert stats["prompt_tokens"] >= sum(map(len, SOURCES))
            assert stats["kv_blocks_free"] == stats["kv_blocks"]
        assert plain_answer(model, SOURCES[0]) == expected(name)[0]  # as before, outside of it


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_of_sources_are_computed_once(name: str, tmp_path: Path) -> None:
    """Also of those that arrive while others decode."""
    with (
        offloaded(plain_model(name), "host", tmp_path) as model,
        LLM(model, context=64, max_batch=2) as llm,
    ):
        ends = ("EncDecAttention.k", "cross_attention.k_proj")
        keys = [module for path, module in model.named_modules() if path.endswith(ends)]
        rows: list[int] = []
        for module in keys:
            module.register_forward_hook(lambda *call: rows.append(call[2].shape[-2]))
        assert tokens_of(llm, SOURCES, GREEDY) == expected(name)
        assert sum(rows) == len(keys) * sum(map(len, SOURCES)) > 0


@pytest.mark.parametrize("name", slow_rows(FAMILIES, 0))
def test_a_request_that_gave_its_blocks_back_is_computed_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are blocks for one request only."""
    from overspill.serve import source

    blocks = source.CacheRequest.blocks
    monkeypatch.setattr(source.CacheRequest, "blocks", lambda *args: blocks(*args) // 3)
    with (
        offloaded(plain_model(name), "host", tmp_path) as model,
        LLM(model, context=48, max_batch=3) as llm,
    ):
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        found = tokens_of(llm, [SOURCES[0], SOURCES[2], SOURCES[3]], params)
    plain = plain_model(name)
    assert found == [plain_answer(plain, SOURCES[n], 40) for n in (0, 2, 3)]


def test_the_routing_that_nllb_was_trained_with(tmp_path: Path) -> None:
    """One after another, so that no token of another request has a part in it."""
    plain = plain_model("nllb-moe")
    with offloaded(plain, "host", tmp_path, FIXED) as model:
        alone = [plain_answer(model, source) for source in SOURCES]
        with LLM(model, context=64, max_batch=4) as llm:
            assert tokens_of(llm, SOURCES, GREEDY) == alone
    assert alone != expected("nllb-moe")


def test_a_forced_first_token(tmp_path: Path) -> None:
    plain = plain_model("nllb-moe")
    with offloaded(plain, "host", tmp_path) as model:
        model.generation_config.forced_bos_token_id = 17
        try:
            with LLM(model, context=64) as llm:
                found = tokens_of(llm, SOURCES[:2], GREEDY)
        finally:
            model.generation_config.forced_bos_token_id = None
    assert found == [plain_answer(plain, source, forced_bos_token_id=17) for source in SOURCES[:2]]


def test_padding_within_a_source_has_its_own_position(tmp_path: Path) -> None:
    plain = plain_model("nllb-moe")
    source = [5, plain.config.pad_token_id, 9, 33, plain.config.pad_token_id, 7]
    with offloaded(plain, "host", tmp_path) as model, LLM(model, context=64) as llm:
        assert tokens_of(llm, [source], GREEDY) == [plain_answer(plain, source)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint(name: str, tmp_path: Path) -> None:
    plain_model(name).save_pretrained(tmp_path / "model")
    folder = tmp_path / "model"
    with LLM(folder, host_memory="3GiB", context=64, slots=2, device="cpu") as llm:
        assert tokens_of(llm, SOURCES, GREEDY) == expected(name)
    with (
        LLM(folder, context=32, device="cpu") as llm,
        pytest.raises(ConfigError, match="longer than the 32 that the encoder takes"),
    ):
        llm.generate([list(range(5, 38))], GREEDY)


@pytest.mark.parametrize(
    ("name", "level"), slow_rows([(name, level) for level in (1, 2) for name in FAMILIES], 1, 2)
)
def test_pregates(name: str, level: int, tmp_path: Path) -> None:
    plain = pregated(name, level)
    answers = [plain_answer(plain, source) for source in SOURCES]
    assert answers != [plain_answer(plain_model(name, **DEEP[name]), each) for each in SOURCES]
    with (
        offloaded(plain, "host", tmp_path) as model,
        LLM(model, context=64, max_batch=4, mode="pre-gated") as llm,
    ):
        assert tokens_of(llm, SOURCES, GREEDY) == answers


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"moe_eval_capacity_token_fraction": 0.5}, "moe_eval_capacity_token_fraction=0.5"),
        ({"second_expert_policy": "random"}, "second_expert_policy='random'"),
    ],
)
def test_routing_that_depends_on_other_requests_is_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    plain = plain_model("nllb-moe", **changes)
    with offloaded(plain, "gpu", tmp_path) as model, pytest.raises(ConfigError, match=match):
        LLM(model)


def test_too_little_memory_for_a_source(tmp_path: Path) -> None:
    plain_model("switch_transformers").save_pretrained(tmp_path)
    with pytest.raises(BudgetError, match="those of a source of as many"):
        LLM(tmp_path, context=1 << 40, device="cpu")


def test_streams_and_several_threads(tmp_path: Path) -> None:
    with (
        offloaded(plain_model("switch_transformers"), "host", tmp_path) as model,
        LLM(model, context=64, max_batch=2) as llm,
    ):
        submitted = [llm.submit(source, GREEDY) for source in SOURCES]
        results: list[Result] = [each.result() for each in submitted]
        assert [each.token_ids for each in results] == expected("switch_transformers")
        pieces = list(llm.stream(SOURCES[0], GREEDY))
        tokens = [token for piece in pieces for token in piece.token_ids]
        assert tokens == expected("switch_transformers")[0]
        cancelled = llm.submit(SOURCES[2], SamplingParams(max_tokens=50, ignore_eos=True))
        cancelled.cancel()
        assert tokens_of(llm, SOURCES, GREEDY) == expected("switch_transformers")
        with torch.no_grad():  # keys and values of sources are void too
            model.decoder.block[0].layer[1].EncDecAttention.v.weight.neg_()
        assert tokens_of(llm, SOURCES[:1], GREEDY) == [plain_answer(model, SOURCES[0])]
        with torch.no_grad():
            model.decoder.block[0].layer[1].EncDecAttention.v.weight.neg_()


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_leave_what_training_uses(name: str, tmp_path: Path) -> None:
    """The routers of NLLB note the tokens of a pass, which limit those of an expert in training."""
    with offloaded(plain_model(name), "host", tmp_path) as model:
        routers = [each for each in model.modules() if hasattr(each, "expert_capacity")]
        for router in routers:
            router.expert_capacity = 50
        with LLM(model, context=64) as llm:
            assert tokens_of(llm, SOURCES[:1], GREEDY) == expected(name)[:1]
        assert [each.expert_capacity for each in routers] == [50] * len(routers)
        left = [each for each in model.modules() if {"forward", "compute_bias"} & {*vars(each)}]
        assert not left


def test_positions_that_a_step_reads_stay_in_memory(tmp_path: Path) -> None:
    """A longer sequence outside of batches replaces the model's own table of them."""
    with (
        offloaded(plain_model("nllb-moe"), "host", tmp_path) as model,
        LLM(model, context=64) as llm,
    ):
        module = model.get_decoder().embed_positions
        address = module.weights.data_ptr()
        module.make_weights(600, module.embedding_dim, module.padding_idx)
        module.weights.normal_(0, 50)  # no batch reads the new one
        assert module.weights.data_ptr() != address
        assert tokens_of(llm, SOURCES[:1], GREEDY) == expected("nllb-moe")[:1]


@pytest.mark.parametrize("way", ["offload", "load", "from_config"])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_replace_no_weights_of_a_bf16_model(name: str, way: str, tmp_path: Path) -> None:
    """Routers convert theirs to float32: decoding steps would read the old ones."""
    plain = copy.deepcopy(plain_model(name)).bfloat16()
    given: dict[str, Any] = {"device": "cpu", "mode": "host", "quiet": True, "progress": False}
    if way == "offload":
        model = overspill.offload(plain, **given)
    elif way == "load":
        plain.save_pretrained(tmp_path)
        model = overspill.load(tmp_path, train=False, **given)
    else:
        given |= {"dtype": torch.bfloat16, "train": False}
        model = overspill.from_config(plain.config, **given)
    with LLM(model, context=64) as llm:
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        tokens_of(llm, SOURCES[:1], GREEDY)
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    model.overspill.close()
