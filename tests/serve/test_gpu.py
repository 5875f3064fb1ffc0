"""Serving on a GPU: the tokens of transformers, within a budget."""

from pathlib import Path

import pytest
import torch

import overspill
from tests.models.huggingface.families import FAMILIES, make_model

pytestmark = pytest.mark.gpu
GREEDY = overspill.SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 33, 7, 12, 80, 41, 3], [4], list(range(20, 50)), [5, 9, 33, 7, 12, 80, 41, 3]]
_NAMES = ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "olmoe", "qwen3_next")
SERVED = [family for family in FAMILIES if family.name in _NAMES]


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_greedy_tokens_are_those_of_transformers(
    family: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    plain = make_model(family).eval()  # type: ignore[arg-type]
    plain.save_pretrained(tmp_path)
    plain.to("cuda")
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        made = plain.generate(
            input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        expected.append(made[0, len(prompt) :].tolist())
    for slots in (3, None):
        with overspill.LLM(str(tmp_path), slots=slots, context=64, device="cuda") as llm:
            for _ in range(6):  # experts move to the GPU meanwhile
                assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected
            assert [llm.generate(p, GREEDY)[0].token_ids for p in PROMPTS] == expected


def test_keys_and_values_are_in_the_budget(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, num_local_experts=16, num_experts_per_tok=2,
        max_position_embeddings=2048,
    )  # fmt: skip
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    budget = 256 << 20
    params = overspill.SamplingParams(max_tokens=16, temperature=1.0, seed=0, ignore_eos=True)
    with overspill.LLM(str(tmp_path), gpu_memory=budget, context=2048, max_batch=8) as llm:
        for _ in range(4):
            llm.generate([[1, 2, 3], list(range(1000))], params)
        use = llm.model.overspill.gpu_use()
        assert use is not None
        assert use["budget"] == budget
        assert use["reserved"] <= budget
        assert llm.stats()["cache_bytes"] > 0
