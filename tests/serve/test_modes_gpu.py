"""Modes of serving on a GPU: the tokens do not depend on what is copied when."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.predictor import Observer
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


def check(
    plain: Any,
    served: str,
    slots: int | None,
    migrate: str = "auto",
    policy: str = "lfu",
    predictor: str | None = None,
    **given: Any,
) -> None:
    """Serves a model in the mode `served`; `given` are budgets."""
    expected = [tokens_of(plain, prompt, 12) for prompt in PROMPTS]
    flags: dict[str, Any] = {"mode": served, "migrate": migrate, "cache_policy": policy}
    flags["predictor"] = predictor
    with (
        offloaded(plain, "none", **given) as model,
        overspill.LLM(model, context=64, max_batch=16, slots=slots, **flags) as llm,
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


@pytest.mark.parametrize(
    ("mode", "migrate", "level", "slots", "policy"),
    [
        ("pre-gated", "copy", 1, 0, "lfu"),
        ("pre-gated", "copy", 3, 6, "lru"),
        ("pre-gated", "copy", 1, 6, "lfu"),
        ("pre-gated", "cpu", 2, 6, "lru"),
        ("auto", "copy", 2, 6, "lru"),
        ("lookahead", "cpu", 1, 6, "lfu"),
        ("prefetch-all", "cpu", 1, 0, "lfu"),
        ("on-demand", "cpu", 1, 6, "lru"),
    ],
)
def test_who_takes_experts_and_which_leave_changes_no_token(
    mode: str, migrate: str, level: int, slots: int, policy: str
) -> None:
    check(deep(level), mode, slots, migrate, policy)


@pytest.fixture
def learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """Learns from every step; the inputs of the gates in each."""
    monkeypatch.setattr("overspill.models.predictor.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("overspill.plan.popularity.LearningPace.allows", lambda *_: True)
    found: list[list[Tensor]] = []
    learn = Observer.observe_step

    def noted(own: Observer, first: int, x_LBD: Any, ids_LBK: Tensor) -> None:
        found.append([x.clone() for x in x_LBD])
        learn(own, first, x_LBD, ids_LBK)

    monkeypatch.setattr(Observer, "observe_step", noted)
    return found


@pytest.mark.usefixtures("learning")
@pytest.mark.parametrize("migrate", ["cpu", "copy"])
@pytest.mark.parametrize("name", ["gpt", "mixtral", "gpt_oss", "deepseek_v3"])
def test_a_predictor_that_learns_changes_no_token(name: str, migrate: str) -> None:
    """The last one is computed by its modules."""
    plain = deep(0) if name == "gpt" else make_model(family(name)).eval().to("cuda")
    check(plain, "lookahead", 3, migrate, predictor="learned")


@pytest.mark.usefixtures("learning")
def test_a_predictor_that_learns_reads_experts_from_disk_ahead(tmp_path: Path) -> None:
    given = {"mode": "disk", "host_slots": 40, "disk": tmp_path / "experts"}
    check(deep(0), "lookahead", 0, predictor="learned", **given)


def test_captured_steps_keep_the_inputs_of_gates_for_the_predictor(
    learning: list[list[Tensor]],
) -> None:
    plain, prompt = deep(0), PROMPTS[0]
    with (
        offloaded(plain, "none") as model,
        overspill.LLM(
            model, context=64, max_batch=2, slots=3, mode="lookahead", predictor="learned"
        ) as llm,
    ):
        tokens = [*prompt, *llm.generate(prompt, GREEDY)[0].token_ids]
        told = llm.stats()
    assert told["predictor_learned_tokens"] > len(prompt)
    seen: list[Tensor] = []
    for layer in plain.moe_layers():
        layer.router.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    with torch.no_grad():
        plain(torch.tensor([tokens], device="cuda"))
    assert len(learning) >= 8
    for number, inputs in enumerate(learning[:8], start=len(prompt)):
        for x_BD, expected in zip(inputs, seen, strict=True):
            torch.testing.assert_close(x_BD[0], expected[number], rtol=1e-3, atol=1e-3)


def test_copies_to_the_gpu_of_experts_on_disk_are_refused(tmp_path: Path) -> None:
    given = {"mode": "disk", "host_slots": 40, "disk": tmp_path}
    with pytest.raises(ConfigError, match="some are on disk; give more host_memory"):
        check(deep(1), "pre-gated", 0, "copy", **given)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("migrate", ["cpu", "copy"])
def test_pre_gates_of_transformers(name: str, migrate: str) -> None:
    """The second one is computed by its modules."""
    plain = overspill.pregate(make_model(family(name)).eval().to("cuda"))
    check(plain, "pre-gated", 2, migrate)


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
    from overspill.serve.decode import step_experts

    failed: list[bool] = []

    def fail_once(compute: Any) -> Any:
        def experts(*args: Any) -> Any:
            if torch.cuda.is_current_stream_capturing() and not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("injected")
            return compute(*args)

        return experts

    monkeypatch.setattr(step_experts, "experts", fail_once(step_experts.experts))
    plain = make_model(family(name)).eval().to("cuda")
    expected = tokens_of(plain, PROMPTS[0], 12)
    with (
        offloaded(plain, "none") as model,
        overspill.LLM(model, context=64, max_batch=2, mode="prefetch-all", slots=3) as llm,
    ):
        assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected
        assert failed
        assert llm.stats()["expert_slots"] == 0, "they were given back, and steps go on"


def test_modes_in_bf16_give_the_same_tokens() -> None:
    """Without the CPU, which would round in other places."""
    plain = copy.deepcopy(deep(1)).to(torch.bfloat16)
    found = []
    for mode in ("on-demand", "prefetch-all", "lookahead", "pre-gated"):
        flags: dict[str, Any] = {"mode": mode, "migrate": "copy", "slots": 0}
        with (
            offloaded(plain, "none") as model,
            overspill.LLM(model, context=64, max_batch=4, **flags) as llm,
        ):
            found.append([llm.generate(p, GREEDY)[0].token_ids for p in PROMPTS])
    assert all(each == found[0] for each in found)
