"""On a GPU: offloaded families follow eager transformers, float32 closely and bf16 in what they
learn."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.models.huggingface.families import make_batch, make_model
from tests.models.huggingface.oracle import ADAM, MODES
from tests.models.huggingface.test_exactness import BY_NAME

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measured_roughly")]
DEVICE = "cuda"
NAMES = ["mixtral", "gpt_oss", "qwen2_moe", "nemotron_h", "deepseek_v3", "switch_transformers"]


def on_device(batch: dict[str, Any], device: str) -> dict[str, Any]:
    return {name: value.to(device) for name, value in batch.items()}


def losses(model: Any, optimizer: Any, batch: dict[str, Any], steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def budgets(mode: str, folder: Path) -> dict[str, Any]:
    given = dict(MODES[mode], quiet=True, progress=False)
    return given | ({"disk": folder} if mode == "disk" else {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_float32_follows_eager(name: str, mode: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    plain = make_model(family).to(DEVICE)
    batch = on_device(make_batch(family, plain), DEVICE)
    twin = overspill.offload(copy.deepcopy(plain), device=DEVICE, **budgets(mode, tmp_path))
    try:
        expected = losses(plain, torch.optim.AdamW(plain.parameters(), **ADAM), batch, 4)
        assert losses(twin, overspill.AdamW(twin, **ADAM), batch, 4) == pytest.approx(
            expected, rel=1e-3
        )
    finally:
        twin.overspill.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_adapters_of_experts_follow_those_of_peft(name: str, mode: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    family = BY_NAME[name]
    plain = make_model(family).to(DEVICE)
    batch = on_device(make_batch(family, plain), DEVICE)
    twin = overspill.offload(copy.deepcopy(plain), device=DEVICE, **budgets(mode, tmp_path))
    config = peft.LoraConfig(
        r=3,
        target_modules=["o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    found = []
    try:
        for model in (plain, twin):
            torch.manual_seed(0)
            adapted = peft.get_peft_model(model, config)
            trained = [each for each in adapted.parameters() if each.requires_grad]
            found.append(losses(adapted, overspill.AdamW(trained, **ADAM), batch, 4))
        assert found[1] == pytest.approx(found[0], rel=1e-3)
    finally:
        twin.overspill.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_bf16_learns_as_eager_does(name: str, mode: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    plain = make_model(family).to(DEVICE)
    batch = on_device(make_batch(family, plain), DEVICE)
    narrow = copy.deepcopy(plain).to(torch.bfloat16)
    twin = overspill.offload(narrow, device=DEVICE, **budgets(mode, tmp_path))
    try:
        expected = losses(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), batch, 12)
        got = losses(twin, overspill.AdamW(twin, lr=3e-3, max_grad_norm=1e9), batch, 12)
        assert got[0] == pytest.approx(expected[0], rel=5e-2)
        assert got[-1] == pytest.approx(expected[-1], rel=0.25, abs=0.1)
        twin.overspill.check_conserved()
    finally:
        twin.overspill.close()


@pytest.mark.parametrize("mode", MODES)
def test_load_and_save(mode: str, tmp_path: Path) -> None:
    family = BY_NAME["mixtral"]
    plain = make_model(family, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "a")
    model = overspill.load(tmp_path / "a", device=DEVICE, **budgets(mode, tmp_path / "spill"))
    try:
        assert {p.device.type for p in model.parameters()} == {DEVICE}
        overspill.save(model, tmp_path / "b")
    finally:
        model.overspill.close()
    again = type(plain).from_pretrained(tmp_path / "b", dtype=torch.bfloat16)
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
