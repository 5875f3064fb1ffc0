"""Models whose tokens see only the tokens that an indexer chooses: answers are those of
transformers, in any batch, with prompts of many more tokens than are chosen."""

from pathlib import Path

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.models.huggingface.sparse import TYPES
from overspill.serve import paged, source
from overspill.serve.runners import PagedRunner
from tests.models.huggingface.families import FAMILIES
from tests.models.huggingface.oracle import offloaded
from tests.serve.models import PROMPTS, plain_generate, plain_model, tokens_of
from tests.slow import slow_names, slow_rows

SPARSE = [family.name for family in FAMILIES if family.name in TYPES]
TEXT = [7 + 5 * number % 83 for number in range(60)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "piece"),
    slow_rows(
        [*zip(SPARSE, [7, 64, 20, 33], strict=True), *zip(SPARSE, [1, 7, 64, 1], strict=True)],
        *range(4, 8),
    ),
)
def test_answers_in_batches_are_those_of_transformers(
    name: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in pieces, beside answers that have begun."""
    plain, expected = plain_model(name)
    assert plain.config.index_topk < 8
    prompts = [*PROMPTS, TEXT[:40]]
    expected = [*expected, plain_generate(plain, TEXT[:40])]
    with (
        offloaded(plain, "host", tmp_path) as model,
        LLM(model, context=64, max_batch=3, prefill_chunk=piece) as llm,
    ):
        assert isinstance(llm._loop.runner, PagedRunner)
        assert tokens_of(llm, prompts, GREEDY) == expected, "together"
        llm.reset_prefix_cache()
        monkeypatch.setattr(paged, "_SCORES", 5 * 4 * 16 * 40)  # of five tokens
        assert tokens_of(llm, [TEXT[:40]], GREEDY) == expected[-1:], "alone"


@pytest.mark.parametrize("name", slow_names(SPARSE, *{*SPARSE} - {"glm_moe_dsa"}))
def test_keys_of_indexers_are_shared_with_blocks(name: str, tmp_path: Path) -> None:
    """At the edge of a block and beside it, and after a request that was cancelled."""
    plain, _ = plain_model(name)
    with offloaded(plain, "host", tmp_path) as model, LLM(model, context=64, max_batch=2) as llm:
        stream = llm.stream(TEXT[:40], SamplingParams(max_tokens=20, ignore_eos=True))
        next(stream)
        stream.close()
        for end, cached in [(32, 16), (33, 32), (34, 32), (17, 16), (16, 0)]:
            prompt = [*TEXT[: end - 1], 3]
            (result,) = llm.generate([prompt], GREEDY)
            assert result.token_ids == plain_generate(plain, prompt), end
            assert result.cached_tokens in (cached, cached + 16 * (end == 32)), end


@pytest.mark.parametrize("name", slow_names(SPARSE, *{*SPARSE} - {"deepseek_v32"}))
def test_requests_that_give_their_blocks_back_have_the_same_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are blocks for one request of this length."""
    blocks = source.CacheRequest.blocks
    monkeypatch.setattr(source.CacheRequest, "blocks", lambda *args: blocks(*args) // 3)
    plain, _ = plain_model(name)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    expected = [plain_generate(plain, prompt, 30) for prompt in PROMPTS[:2]]
    with offloaded(plain, "host", tmp_path) as model, LLM(model, context=64, max_batch=3) as llm:
        assert tokens_of(llm, PROMPTS[:2], params) == expected


def test_keys_of_indexers_are_in_the_budget_and_counted(tmp_path: Path) -> None:
    for name in SPARSE:
        plain, _ = plain_model(name)
        with offloaded(plain, "gpu", tmp_path) as model, LLM(model, context=64) as llm:
            tokens_of(llm, PROMPTS[:1], SamplingParams(max_tokens=1))
            slots = (llm._source.n_blocks + 1) * 16
            own = source._token_bytes(plain, torch.float32)
            assert llm.stats()["cache_bytes"] == slots * own, name
            indexers = [m for m in plain.modules() if hasattr(m, "index_topk")]
            without = [m for m in plain.modules() if hasattr(m, "kv_b_proj")]
            assert own == 4 * (
                sum(m.num_heads * (m.qk_head_dim + m.v_head_dim) for m in without)
                + sum(m.head_dim for m in indexers)
            )
            assert bool(indexers)
