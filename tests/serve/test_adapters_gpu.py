"""Adapters of experts beside their weights, served on a GPU: the tokens of peft."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.models.budgets import Budgets
from overspill.models.huggingface.load import load_within
from tests.models.huggingface.adapters import Adapted, save_adapter
from tests.models.huggingface.packed.cases import Pairs
from tests.models.huggingface.test_expert_lora import BOTH, make
from tests.models.huggingface.test_load import again
from tests.serve.test_gpu import GREEDY, PROMPTS, every_place, set_residents, tokens_of

pytestmark = pytest.mark.gpu
FAMILIES = ["mixtral", "gpt_oss", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe"]


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A list that grows with each replay of a graph; empty afterwards is a failure."""
    found: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        found.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    yield found
    assert found


@contextmanager
def beside(made: Adapted, residents: str, **given: Any) -> Iterator[Any]:
    """The base model on the GPU, with the adapter of its experts beside their weights."""
    budgets = Budgets(device="cuda", mode="host", slots=8, progress=False, quiet=True)
    options: Any = {"dtype": torch.float32, "train": False, "merged": False, **given}
    model = load_within(made.base, budgets, adapter=made.folder, **options)
    try:
        assert all(model.overspill.layout.ranks)
        set_residents(model, residents)
        yield model
    finally:
        model.overspill.close()


def check(made: Adapted, residents: str, given: dict[str, Any], **how: Any) -> None:
    """One request, several, and so many that an expert is read once for all."""
    plain = made.model.to("cuda")
    expected = [tokens_of(plain, prompt, 12) for prompt in PROMPTS]
    with (
        beside(made, residents, **given) as model,
        overspill.LLM(model, context=64, max_batch=16, **how) as llm,
    ):
        for _ in range(2):
            assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected, "together"
            assert [llm.generate(p, GREEDY)[0].token_ids for p in PROMPTS] == expected, "alone"
        many = [r.token_ids for r in llm.generate(PROMPTS * 4, GREEDY)]
        assert many == expected * 4, "an expert of many tokens is read once"


@every_place
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_of_peft(name: str, residents: str, tmp_path: Path) -> None:
    check(make(name, tmp_path), residents, {}, slots=3 if residents == "some" else None)


@pytest.mark.parametrize("migrate", ["cpu", "copy"])
@pytest.mark.parametrize("mode", ["on-demand", "prefetch-all", "lookahead"])
def test_modes(mode: str, migrate: str, tmp_path: Path) -> None:
    check(make("gpt_oss", tmp_path), "none", {}, slots=3, mode=mode, migrate=migrate)


@every_place
@pytest.mark.parametrize("name", ["mxfp4", "fp8-block", "int4", "nvfp4"])
def test_packed_experts(name: str, residents: str, tmp_path: Path) -> None:
    pair = Pairs(tmp_path)[name]
    made = save_adapter(again(pair.family, pair.plain).eval(), tmp_path, pair.packed, **BOTH)
    check(made, residents, {"packed": True}, slots=2)


@pytest.mark.parametrize("residents", ["all", "none"])
@pytest.mark.parametrize(("quantize", "near"), [(None, 0.06), ("fp8", 0.1)])
def test_bf16(quantize: str | None, near: float, residents: str, tmp_path: Path) -> None:
    """Grouped products of prompts are near those of peft in float32."""
    made = make("qwen3_moe", tmp_path)
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        expected = made.model(ids).logits
    with beside(made, residents, dtype=torch.bfloat16, quantize=quantize) as model:
        with torch.no_grad():
            found = model(ids.to("cuda")).logits.float().cpu()
        assert (found - expected).norm() < near * expected.norm()
        with overspill.LLM(model, context=64, max_batch=4, slots=3) as llm:
            assert all(len(each.token_ids) == 12 for each in llm.generate(PROMPTS, GREEDY))
