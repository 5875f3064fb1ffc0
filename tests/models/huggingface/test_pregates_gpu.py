"""On a GPU: pre-gates of transformers models, trained, saved and served."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.models.huggingface.families import Family, make_batch, make_model
from tests.models.huggingface.oracle import ADAM, MODES
from tests.models.huggingface.pregated import DEEP, call_by_hand
from tests.models.huggingface.test_expert_ids import FEW, Noted, check, hosted
from tests.models.huggingface.test_gpu import budgets, losses, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measured_roughly")]
BY_NAME = {family.name: family for family in DEEP}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", DEEP, ids=lambda family: family.name)
def test_training_follows_gates_that_are_called_by_hand(
    family: Family, mode: str, tmp_path: Path
) -> None:
    level = 1 + list(MODES).index(mode)
    model = make_model(family).train()
    plain = call_by_hand(copy.deepcopy(model).to("cuda"), level)
    batch = on_device(make_batch(family, plain), "cuda")
    expected = losses(plain, torch.optim.AdamW(plain.parameters(), **ADAM), batch, 3)
    twin = overspill.offload(model, device="cuda", **budgets(mode, tmp_path))
    try:
        overspill.pregate(twin, level)
        twin.gradient_checkpointing_enable()
        got = losses(twin, overspill.AdamW(twin, **ADAM), batch, 3)
        assert got == pytest.approx(expected, rel=1e-3)
        twin.overspill.check_conserved()
    finally:
        twin.overspill.close()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_an_llm_serves_what_was_saved(name: str, tmp_path: Path) -> None:
    """Batches of one token as graphs, which the model's own modules are captured in."""
    family = BY_NAME[name]
    model = overspill.pregate(make_model(family).eval())
    prompt = make_batch(family, model)["input_ids"][:1]
    plain = copy.deepcopy(model).to("cuda")
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    (expected,) = plain.generate(prompt.cuda(), **given)
    overspill.save(model, tmp_path / "out")
    with overspill.LLM(tmp_path / "out", device="cuda", gpu_memory="2GiB") as llm:
        params = overspill.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        for result in llm.generate([prompt[0].tolist()] * 2, params):
            assert result.token_ids == expected[prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("jamba", False),
        ("deepseek_v3", False),
        ("switch_transformers", False),
        ("nllb-moe", False),
        ("nllb-moe", True),
    ],
)
def test_announced_experts_are_those_that_are_needed(
    name: str, fixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = next(family for family in FEW if family.name == name)
    noted = Noted(monkeypatch)
    model = overspill.pregate(make_model(family).eval())
    with hosted(model, tmp_path, "cuda", fix_nllb_routing=fixed) as twin:
        check(twin, family, 1, noted)


def test_bf16_learns_as_float32_does(tmp_path: Path) -> None:
    family = BY_NAME["mixtral"]
    plain = overspill.pregate(make_model(family).train(), 2).to("cuda")
    batch = on_device(make_batch(family, plain), "cuda")
    twin = copy.deepcopy(plain).to(torch.bfloat16)
    twin = overspill.offload(twin, device="cuda", **budgets("host", tmp_path))
    try:
        expected = losses(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), batch, 12)
        got = losses(twin, overspill.AdamW(twin, lr=3e-3, max_grad_norm=1e9), batch, 12)
        assert got[0] == pytest.approx(expected[0], rel=5e-2)
        assert got[-1] == pytest.approx(expected[-1], rel=0.25, abs=0.1)
    finally:
        twin.overspill.close()
