"""Modes of serving on a GPU: the tokens do not depend on what is copied when."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.serve.decode import decode
from overspill.serve.decode.rates import ReadRates
from tests.models.huggingface.families import make_model
from tests.moe.oracle import delays
from tests.serve.models import family
from tests.serve.test_gpu import GREEDY, PROMPTS, offloaded, tokens_of

pytestmark = pytest.mark.gpu
COPYING = ["on-demand", "prefetch-all", "lookahead"]
DEEP = GPTConfig(
    vocab=256, n_layers=5, d_model=64, d_hidden=96, n_heads=4, n_experts=12, top_k=2, gated=True,
    max_seq=128,
)  # fmt: skip


def deep(level: int) -> GPTMoE:
    model = GPTMoE(DEEP, checkpoint=False, seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return overspill.pregate(model.to("cuda"), level) if level else model.to("cuda")


def check(plain: Any, served: str, slots: int | None, **given: Any) -> None:
    """Serves a model in the mode `served`; `given` are budgets."""
    expected = [tokens_of(plain, prompt, 12) for prompt in PROMPTS]
    with (
        offloaded(plain, "none", **given) as model,
        overspill.LLM(model, context=64, max_batch=16, mode=served, slots=slots) as llm,
    ):
        for _ in range(2):
            assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == expected, "together"
            assert [llm.generate(p, GREEDY)[0].token_ids for p in PROMPTS] == expected, "alone"
        many = [r.token_ids for r in llm.generate(PROMPTS * 4, GREEDY)]
        assert many == expected * 4, "an expert of many tokens is read once"


@pytest.mark.parametrize("slots", [0, 3])
@pytest.mark.parametrize("mode", COPYING)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_tokens_of_transformers(name: str, mode: str, slots: int) -> None:
    check(make_model(family(name)).eval().to("cuda"), mode, slots)


@pytest.mark.parametrize("slots", [0, 6])
@pytest.mark.parametrize(
    ("mode", "level"),
    [("auto", 2), ("on-demand", 1), ("lookahead", 2), ("pre-gated", 1), ("pre-gated", 3)],
)
def test_the_tokens_of_a_model_with_pre_gates(mode: str, level: int, slots: int) -> None:
    check(deep(level), mode, slots)


@pytest.fixture
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which pre-gated experts are copied."""
    monkeypatch.setattr(decode, "read_rates", lambda _: ReadRates(cpu=1.0, link=2.0))


@pytest.mark.usefixtures("fast_link")
@pytest.mark.parametrize("slots", [0, 6])
@pytest.mark.parametrize("level", [1, 3])
def test_pre_gated_experts_are_copied_where_that_is_faster(level: int, slots: int) -> None:
    check(deep(level), "pre-gated", slots)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("copied", [False, True])
def test_pre_gates_of_transformers(name: str, copied: bool, request: pytest.FixtureRequest) -> None:
    """The second one is computed by its modules."""
    if copied:
        request.getfixturevalue("fast_link")
    plain = overspill.pregate(make_model(family(name)).eval().to("cuda"))
    check(plain, "pre-gated", 2)


@pytest.mark.parametrize(
    ("mode", "level"), [("on-demand", 0), ("lookahead", 0), ("pre-gated", 1), ("auto", 2)]
)
def test_experts_on_disk(mode: str, level: int, tmp_path: Path) -> None:
    late = overspill.Settings(inject=delays(seed=1, longest=1e-3, only="ssd read"))
    given = {"mode": "disk", "host_slots": 40, "disk": tmp_path, "settings": late}
    check(deep(level), mode, 0, **given)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_a_step_whose_capture_finds_no_memory_is_tried_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies have begun on another stream. Copies of experts give way; the second model is
    computed by its modules."""
    from overspill.serve.decode import module_step, step

    failed: list[bool] = []

    def fail_once(compute: Any) -> Any:
        def experts(*args: Any) -> Any:
            if torch.cuda.is_current_stream_capturing() and not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("injected")
            return compute(*args)

        return experts

    for module in (step, module_step):
        monkeypatch.setattr(module, "experts", fail_once(module.experts))
    plain = make_model(family(name)).eval().to("cuda")
    expected = tokens_of(plain, PROMPTS[0], 12)
    with (
        offloaded(plain, "none") as model,
        overspill.LLM(model, context=64, max_batch=2, mode="prefetch-all", slots=3) as llm,
    ):
        assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected
        assert failed
        assert llm.stats()["expert_slots"] == 0, "they were given back, and steps go on"


@pytest.mark.usefixtures("fast_link")  # the CPU would round in other places
def test_modes_in_bf16_give_the_same_tokens() -> None:
    plain = copy.deepcopy(deep(1)).to(torch.bfloat16)
    found = []
    for mode in ("on-demand", "prefetch-all", "lookahead", "pre-gated"):
        with (
            offloaded(plain, "none") as model,
            overspill.LLM(model, context=64, max_batch=4, mode=mode, slots=0) as llm,
        ):
            found.append([llm.generate(p, GREEDY)[0].token_ids for p in PROMPTS])
    assert all(each == found[0] for each in found)
