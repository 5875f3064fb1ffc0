"""Every family: logits, all gradients and a step of AdamW equal eager transformers."""

import copy
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.compute.cpu_kernel import cpu_isa
from overspill.core.errors import ConfigError
from overspill.moe.layer_pass import LayerPass
from overspill.moe.streaming import compute
from overspill.moe.streaming.cpu_experts import CpuExperts, CpuJob
from tests.models.huggingface.families import FAMILIES, Family, cases, make_batch, make_model
from tests.models.huggingface.oracle import (
    ADAM,
    MODES,
    assert_same_gradients,
    assert_same_weights,
    expert_gradients,
    offloaded,
)
from tests.moe.streaming.policies import random_policy
from tests.slow import slow_rows

# families that Overspill refuses by name, see test_refused.py
UNSUPPORTED = ("muse_spark",)
SUPPORTED = tuple(family for family in FAMILIES if family.name not in UNSUPPORTED)
BY_NAME = {family.name: family for family in SUPPORTED}


def check(
    family: Family,
    mode: str,
    folder: Path,
    steps: int = 1,
    checkpointing: bool | None = None,
    frozen_split: int | None = None,
    split: int | None = None,
) -> None:
    """Logits, loss, gradients and weights after each step equal eager transformers. With `split` a
    random part of the experts computes on the CPU, and with `frozen_split` of frozen ones."""
    plain = make_model(family)
    batch = make_batch(family, plain)
    if checkpointing is not None:
        plain.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    if frozen_split is not None:
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(".experts." not in name)
    settings = None
    seed = split if frozen_split is None else frozen_split
    if seed is not None:
        settings = overspill.Settings(
            cpu_experts=True,
            cpu_training=split is not None,
            cpu_policy=random_policy(seed),
            threads=1,
        )
    with offloaded(plain, mode, folder, settings) as twin:
        theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAM)
        mine = overspill.AdamW(twin, max_grad_norm=1e9, **ADAM)
        for step in range(steps):
            expected, got = plain(**batch), twin(**batch)
            atol = 1e-5 * float(expected.logits.detach().abs().max())
            torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=atol)
            torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
            expected.loss.backward()
            got.loss.backward()
            for name, parameter in plain.named_parameters():
                # an expert without tokens decays too
                if parameter.requires_grad and parameter.grad is None and ".experts." in name:
                    parameter.grad = torch.zeros_like(parameter)
            theirs.step()
            mine.step()
            if step == 0:
                experts = expert_gradients(twin, mine) if frozen_split is None else {}
                assert_same_gradients(plain, twin, experts)
            assert_same_weights(plain, twin, atol=1e-5)
            theirs.zero_grad()
            mine.zero_grad()
        assert twin.num_parameters() == plain.num_parameters()
        twin.overspill.check_conserved()


@pytest.mark.parametrize("family", cases(SUPPORTED))
def test_family_follows_eager_transformers(family: Family, tmp_path: Path) -> None:
    # each family in one mode, so that all modes see many families
    mode = list(MODES)[SUPPORTED.index(family) % len(MODES)]
    check(family, mode, tmp_path)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *product(["mixtral"], MODES),
        *slow_rows(product(["gpt_oss"], MODES), 0, 1),
        pytest.param("qwen2_moe", "host", marks=pytest.mark.slow),
        ("switch_transformers", "disk"),
    ],
)
def test_every_mode_for_two_steps(name: str, mode: str, tmp_path: Path) -> None:
    check(BY_NAME[name], mode, tmp_path, steps=2)


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        *product(["mixtral"], [False, True]),
        *slow_rows(product(["nemotron_h"], [False, True]), 0),
        pytest.param("deepseek_v3", True, marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, marks=pytest.mark.slow),
        ("phimoe", True),
    ],
)
def test_gradient_checkpointing(name: str, reentrant: bool, tmp_path: Path) -> None:
    check(BY_NAME[name], "host", tmp_path, checkpointing=reentrant)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *slow_rows(product(["mixtral", "gpt_oss"], ["host", "disk"]), 0, 2),
        *slow_rows(product(["qwen2_moe", "nllb-moe", "phimoe"], ["host"]), 0, 2),
        *product(["switch_transformers"], ["disk"]),
    ],
)
def test_any_split_of_frozen_experts_between_cpu_and_device(
    name: str, mode: str, tmp_path: Path
) -> None:
    """With biases, other activations, transposed weights and dropped tokens."""
    check(BY_NAME[name], mode, tmp_path, frozen_split=2)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *product(["mixtral", "switch_transformers", "nllb-moe"], ["host"]),
        pytest.param("nemotron_h", "host", marks=pytest.mark.slow),
        *product(["gpt_oss"], ["host", "disk"]),
    ],
)
def test_any_split_of_trained_experts_between_cpu_and_device(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases, transposed weights and clamped activations. Those on disk stay on the device."""
    backward, formed = CpuExperts.backward, Counter[int]()

    def counted(self: CpuExperts, layer_pass: LayerPass, *args: Any) -> CpuJob:
        formed.update(args[-1].keys())
        return backward(self, layer_pass, *args)

    monkeypatch.setattr(CpuExperts, "backward", counted)
    monkeypatch.setattr(compute, "max_kernel_rows", lambda dtype, backward: 64)
    check(BY_NAME[name], mode, tmp_path, steps=2, split=4)
    assert bool(formed) == (mode != "disk")


@pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler")
def test_cpu_experts_with_another_activation_are_refused(tmp_path: Path) -> None:
    plain = make_model(BY_NAME["minimax_m3_vl_text"])
    settings = overspill.Settings(cpu_experts=True)
    with (
        pytest.raises(ConfigError, match=r"the activation .* GELU, .*; leave out cpu_experts \("),
        offloaded(plain, "host", tmp_path, settings),
    ):
        pass


@pytest.mark.parametrize("reentrant", [False, True])
def test_any_split_under_gradient_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    check(BY_NAME["mixtral"], "host", tmp_path, checkpointing=reentrant, frozen_split=3)


@pytest.mark.parametrize(
    "name", slow_rows(["mixtral", "gpt_oss", "nemotron_h", "deepseek_v3"], 2, 3)
)
def test_bf16_stays_near_float32(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    wide = make_model(family)
    narrow = copy.deepcopy(wide).to(torch.bfloat16)
    batch = make_batch(family, wide)
    with torch.no_grad(), offloaded(narrow.eval(), "host", tmp_path) as twin:
        expected, eager = wide(**batch).loss, narrow(**batch).loss
        mine = twin(**batch).loss
    # as near as eager transformers in bf16 comes, with room for another order of roundings
    assert abs(mine - expected) <= 2 * abs(eager - expected) + 2e-2 * abs(expected)


def test_accumulated_micro_batches_equal_one_batch(tmp_path: Path) -> None:
    family = BY_NAME["qwen3_moe"]
    plain = make_model(family)
    batches = [make_batch(family, plain, seed) for seed in range(3)]
    with offloaded(plain, "host", tmp_path) as twin:
        theirs = torch.optim.AdamW(plain.parameters(), **ADAM)
        mine = overspill.AdamW(twin, max_grad_norm=0.1, **ADAM)
        for batch in batches:
            (plain(**batch).loss / 3).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        theirs.step()
        for batch in batches[:-1]:
            with mine.accumulate():
                (twin(**batch).loss / 3).backward()
        (twin(**batches[-1]).loss / 3).backward()
        mine.step()
        assert mine.total_norm == pytest.approx(float(norm), rel=1e-5)
        assert_same_weights(plain, twin, atol=1e-5)


def test_frozen_experts_stay_and_pass_gradients_on(tmp_path: Path) -> None:
    family = BY_NAME["mixtral"]
    plain = make_model(family)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("experts" not in name)
    batch = make_batch(family, plain)
    with offloaded(plain, "host", tmp_path) as twin:
        mine = overspill.AdamW(twin, **ADAM)
        theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAM)
        for model, optimizer in ((plain, theirs), (twin, mine)):
            model(**batch).loss.backward()
            optimizer.step()
        assert_same_weights(plain, twin, atol=1e-5)


@pytest.mark.parametrize("name", slow_rows(["mixtral", "gpt_oss"], 1))
def test_clipping_gives_the_same_bits_in_every_mode(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    norms: dict[str, list[float | None]] = {}
    for mode in MODES:
        plain = make_model(family)
        batch = make_batch(family, plain)
        with offloaded(plain, mode, tmp_path) as twin:
            optimizer = overspill.AdamW(twin, max_grad_norm=0.5, **ADAM)
            norms[mode] = []
            for _ in range(3):
                twin(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                norms[mode].append(optimizer.total_norm)
    assert norms["gpu"] == norms["host"] == norms["disk"]
