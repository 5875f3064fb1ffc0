"""Packed experts on a GPU: what unpacked ones compute, wherever they are."""

from typing import Any

import pytest
import torch

import overspill
from tests.models.huggingface.families import make_batch
from tests.models.huggingface.packed.cases import CASES, Pair, Pairs
from tests.models.huggingface.test_load import outputs
from tests.serve.test_gpu import GREEDY, PROMPTS, fused

__all__ = ["fused"]
pytestmark = pytest.mark.gpu


def load(pair: Pair, packed: bool) -> Any:
    given = {"device": "cuda", "dtype": "float32", "train": False, "quiet": True, "progress": False}
    settings = overspill.Settings(residency=False)  # experts stay where a test puts them
    return overspill.load(pair.packed, packed=packed, settings=settings, **given)


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_computed_as_with_unpacked_experts(name: str, pairs: Pairs) -> None:
    made = []
    for packed in (True, False):
        model = load(pairs[name], packed)
        engine, batch = model.overspill, make_batch(pairs[name].family, model)
        batch = {key: value.to("cuda") for key, value in batch.items()}
        layers, experts = engine.n_layers, engine.n_experts
        for residents in ([experts] * layers, [0] * layers, [1] * layers):
            engine.set_residents(residents)
            made.append(outputs(model, batch).cpu())
        engine.check_conserved()
        engine.close()
    for logits in made[1:]:
        torch.testing.assert_close(logits, made[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "residents", "slots", "migrate"),
    [
        *((name, "all", 0, "copy") for name in CASES),
        ("mxfp4", "some", 3, "copy"),
        ("mxfp4", "none", 0, "cpu"),
        ("mxfp4", "none", 0, "copy"),
        ("fp8-block", "none", 3, "copy"),
        ("fp8-block", "some", 3, "cpu"),
        ("awq", "some", 0, "cpu"),
        ("nvfp4", "none", 3, "copy"),
    ],
)
def test_tokens_are_those_of_unpacked_experts(
    name: str, residents: str, slots: int, migrate: str, pairs: Pairs, fused: list[int]
) -> None:
    tokens = []
    for packed in (True, False):
        model = load(pairs[name], packed)
        engine = model.overspill
        count = {"all": engine.n_experts, "some": 1, "none": 0}[residents]
        engine.set_residents([count] * engine.n_layers)
        given = {"context": 64, "max_batch": 16, "slots": slots, "migrate": migrate}
        with overspill.LLM(model, **given) as llm:
            alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
            together = [each.token_ids for each in llm.generate(PROMPTS, GREEDY)]
            many = [each.token_ids for each in llm.generate(PROMPTS * 4, GREEDY)]
            stats = llm.stats()
        if residents != "all":
            assert stats["experts_missed"] > 0
            assert (stats["experts_on_cpu"] > 0) == (migrate == "cpu")
        assert alone == together
        assert many == alone * 4, "an expert of many tokens is read once"
        tokens.append(alone)
        engine.check_conserved()
        engine.close()
    assert tokens[0] == tokens[1]
    if name in ("mxfp4", "fp8-block", "int4", "awq"):  # the others may be of other families
        assert {1, 4, 16} <= set(fused)


@pytest.mark.parametrize("name", ["mxfp4", "fp8-block", "awq"])
def test_tokens_of_a_budget_are_those_of_unpacked_experts(name: str, pairs: Pairs) -> None:
    """The usual way: a checkpoint is served within a budget."""
    tokens = []
    for packed in (True, False):
        given = {"device": "cuda", "dtype": "float32", "context": 64, "max_batch": 16}
        with overspill.LLM(pairs[name].packed, packed=packed, **given) as llm:
            tokens.append([each.token_ids for each in llm.generate(PROMPTS, GREEDY)])
    assert tokens[0] == tokens[1]
