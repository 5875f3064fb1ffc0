"""Fused steps with adapters of experts beside their weights give the logits of peft."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.compute.decode import constants
from overspill.models.budgets import Budgets
from overspill.models.huggingface.load import load_within
from overspill.models.huggingface.pregate_file import gate_tensors
from tests.models.huggingface.adapters import Adapted, save_adapter
from tests.models.huggingface.families import make_model
from tests.models.huggingface.packed.cases import Pairs
from tests.models.huggingface.test_exactness import BY_NAME
from tests.models.huggingface.test_expert_lora import BOTH, make
from tests.models.huggingface.test_load import again
from tests.serve.decode.decoding import INTERPRETED, Decoding
from tests.serve.models import PROMPTS
from tests.slow import slow_names

pytestmark = INTERPRETED
FAMILIES = ["mixtral", "gpt_oss", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make("mixtral", tmp_path_factory.mktemp("adapted"))


@contextmanager
def beside(made: Adapted, folder: Path, mode: str = "host", **given: Any) -> Iterator[Any]:
    """The base model with the adapter of its experts beside their weights."""
    budgets: dict[str, Any] = {"mode": mode, "slots": 3, "device": "cpu"}
    if mode == "disk":
        budgets |= {"host_slots": 6, "disk": folder}
    asked: Any = (torch.float32, False)
    options = {"adapter": made.folder, "merged": False, **given}
    model = load_within(made.base, Budgets(**budgets, quiet=True), *asked, **options)
    try:
        assert all(model.overspill.layout.ranks)
        yield model
        model.overspill.check_conserved()
    finally:
        model.overspill.close()


def decode(
    plain: Any, model: Any, residents: Sequence[int], n_prompts: int = 1, steps: int = 2, **how: Any
) -> dict[str, Any]:
    """Decodes some steps, whose logits are those of `plain`."""
    if residents:
        model.overspill.set_residents(residents)
    made = Decoding(plain, model, PROMPTS[:n_prompts], **how)
    try:
        for _ in range(steps):
            made.step()
        return dict(made.runner.stats())
    finally:
        made.runner.close()


@pytest.mark.parametrize("name", slow_names(FAMILIES, "mixtral", "qwen3_moe", "olmoe", "glm4_moe"))
def test_the_logits_of_peft(
    name: str, tmp_path: Path, steps: list[int], module_steps: list[int]
) -> None:
    """Some experts live on the GPU, some are copied there, and the CPU computes the others."""
    made = make(name, tmp_path)
    with beside(made, tmp_path) as model:
        residents = [1] + [0] * (model.overspill.n_layers - 1)
        decode(made.model, model, residents, slots=3)
    assert steps + module_steps == [1, 1]


WAYS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "all on the GPU": ([4, 4], {}),
    "none": ([0, 0], {"n_prompts": 2, "migrate": "cpu"}),
    "copied ahead": ([1, 0], {"mode": "prefetch-all"}),
    "copied when needed": ([0, 2], {"mode": "on-demand", "n_prompts": 2}),
    "guessed": ([0, 1], {"mode": "lookahead", "slots": 2}),
    "guessed, on the CPU": ([0, 0], {"mode": "lookahead", "migrate": "cpu"}),
}


@pytest.mark.parametrize(
    "way", slow_names(WAYS, *(way for way in WAYS if way not in ("none", "copied ahead")))
)
def test_adapters_are_where_experts_are(
    way: str, adapted: Adapted, tmp_path: Path, steps: list[int]
) -> None:
    residents, how = WAYS[way]
    with beside(adapted, tmp_path) as model:
        stats = decode(adapted.model, model, residents, **how)
    assert len(steps) == 2
    assert way != "none" or stats["experts_on_cpu"] > 0


def test_adapters_are_read_from_disk(adapted: Adapted, tmp_path: Path, steps: list[int]) -> None:
    with beside(adapted, tmp_path, "disk") as model:
        assert model.overspill.bytes_by_tier()["disk"] > 0
        decode(adapted.model, model, [])
    assert steps == [1, 1]


def test_pre_gates_in_the_folder_of_an_adapter(tmp_path: Path, steps: list[int]) -> None:
    """Experts that they have chosen are copied ahead with their adapters."""
    plain: Any = make_model(BY_NAME["mixtral"]).eval()
    plain.save_pretrained(tmp_path / "base")
    overspill.pregate(plain)
    with torch.no_grad():
        for gate in gate_tensors(plain).values():
            gate.neg_()  # they choose other experts than the gates of the base
    made = save_adapter(plain, tmp_path, tmp_path / "base", **BOTH)
    overspill.save(made.model, made.folder)
    with beside(made, tmp_path) as model:
        decode(made.model, model, [0, 0], mode="pre-gated")
    assert steps == [1, 1]


def test_several_requests_read_an_expert_once(
    adapted: Adapted, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "SEVERAL", 1)
    with beside(adapted, tmp_path) as model:
        decode(adapted.model, model, [2, 0], n_prompts=3, steps=1)
    assert steps == [4]


PACKED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "mxfp4": ([1, 0], {"slots": 3}),
    "fp8-block": ([0, 0], {"migrate": "cpu", "n_prompts": 2}),
    "awq": ([4, 4], {}),
    "nvfp4": ([0, 1], {"mode": "prefetch-all"}),
}


@pytest.mark.parametrize("name", slow_names(PACKED, "fp8-block", "awq", "nvfp4"))
def test_packed_experts(name: str, tmp_path: Path, steps: list[int]) -> None:
    pair, (residents, how) = Pairs(tmp_path)[name], PACKED[name]
    plain = again(pair.family, pair.plain).eval()
    made = save_adapter(plain, tmp_path, pair.packed, **BOTH)
    with beside(made, tmp_path, packed=True) as model:
        decode(made.model, model, residents, **how)
    assert len(steps) == 2
