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
from tests.serve.test_gpu import GREEDY, PROMPTS, every_home, set_homes, tokens_of

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
def beside(made: Adapted, homes: str, **given: Any) -> Iterator[Any]:
    """The base model on the GPU, with the adapter of its experts beside their weights."""
    budgets = Budgets(device="cuda", mode="host", slots=8, quiet=True)
    asked: Any = (torch.float32, False)
    options = {"adapter": made.folder, "merged": False, **given}
    model = load_within(made.base, budgets, *asked, **options)
    try:
        assert all(model.overspill.layout.ranks)
        set_homes(model, homes)
        yield model
    finally:
        model.overspill.close()


def check(made: Adapted, homes: str, given: dict[str, Any], **how: Any) -> None:
    """One request, several, and so many that an expert is read once for all."""
    plain = made.model.to("cuda")
    expected = [tokens_of(plain, prompt, 12) for prompt in PROMPTS]
    with (
        beside(made, homes, **given) as model,
        overspill.LLM(model, context=64, max_batch=16, **how) as llm,
    ):
        for _ in range(2):
            assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected, "together"
            assert [llm.generate(p, GREEDY)[0].token_ids for p in PROMPTS] == expected, "alone"
        many = [r.token_ids for r in llm.generate(PROMPTS * 4, GREEDY)]
        assert many == expected * 4, "an expert of many tokens is read once"


@every_home
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_of_peft(name: str, homes: str, tmp_path: Path) -> None:
    check(make(name, tmp_path), homes, {}, slots=3 if homes == "some" else None)


@pytest.mark.parametrize("migrate", ["cpu", "copy"])
@pytest.mark.parametrize("mode", ["on-demand", "prefetch-all", "lookahead"])
def test_modes(mode: str, migrate: str, tmp_path: Path) -> None:
    check(make("gpt_oss", tmp_path), "none", {}, slots=3, mode=mode, migrate=migrate)


@every_home
@pytest.mark.parametrize("name", ["mxfp4", "fp8-block", "int4", "nvfp4"])
def test_packed_experts(name: str, homes: str, tmp_path: Path) -> None:
    pair = Pairs(tmp_path)[name]
    made = save_adapter(again(pair.family, pair.plain).eval(), tmp_path, pair.packed, **BOTH)
    check(made, homes, {"packed": True}, slots=2)


@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_bf16(quantize: str | None, tmp_path: Path) -> None:
    """Grouped products of prompts and kernels of steps, in a small budget and on disk."""
    made = make("qwen3_moe", tmp_path)
    given: dict[str, Any] = {"dtype": torch.bfloat16, "quantize": quantize, "device": "cuda"}
    logits, tokens = [], []
    for more in ({}, {"slots": 2, "disk": tmp_path, "host_memory": "1MiB"}):
        with overspill.LLM(made.folder, context=64, **given, **more) as llm:
            assert all(llm.model.overspill.layout.ranks)
            ids = torch.tensor([PROMPTS[2]], device="cuda")
            with torch.no_grad():
                logits.append(llm.model(ids).logits.float().cpu())
            tokens.append([r.token_ids for r in llm.generate(PROMPTS, GREEDY)])
    with torch.no_grad():
        expected = made.model(torch.tensor([PROMPTS[2]])).logits
    near = 0.05 if quantize is None else 0.2
    for found in logits:
        assert (found - expected).abs().max() < near * expected.abs().max()
    assert tokens[0] == tokens[1]
