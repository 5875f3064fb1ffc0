"""Switch and NLLB-MoE: their experts, the routing that transformers gives to NLLB-MoE, and that
which it was trained with."""

import copy
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overspill
from overspill.compute.cpu_kernel import cpu_isa
from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from tests.models.huggingface.families import FAMILIES, make_batch, make_model
from tests.models.huggingface.oracle import (
    ADAM,
    assert_same_gradients,
    budgets,
    expert_gradients,
    offloaded,
)
from tests.moe.streaming.frozen import cpu_jobs, cpu_settings
from tests.moe.streaming.policies import all_on_cpu

BY_NAME = {family.name: family for family in FAMILIES}
NLLB = BY_NAME["nllb-moe"]
FIXED = overspill.Settings(fix_nllb_routing=True)


def naive_block(block: Any, hidden: Tensor, *_: object) -> Tensor:
    """Top-2 routing token by token: the softmax over all experts, of which the two highest count.
    An expert computes no more tokens than its capacity, first choices first; the weights that are
    left add up to 1."""
    router, n_experts = block.router, block.num_experts
    x_TD = hidden.flatten(0, 1)
    logits_TE = F.linear(x_TD, router.classifier.weight, router.classifier.bias)
    probs_TE = logits_TE.softmax(-1)
    choices = logits_TE.argsort(-1, descending=True)[:, :2].tolist()
    capacity = router.expert_capacity
    if not router.training and router.moe_eval_capacity_token_fraction > 0:
        capacity = math.ceil(router.moe_eval_capacity_token_fraction * len(x_TD))
    used, kept = [0] * n_experts, set()
    for rank in range(2):
        for token, experts in enumerate(choices):
            if used[experts[rank]] < capacity:
                kept.add((token, rank))
            used[experts[rank]] += 1
    share = 1 - block.experts.moe_token_dropout
    rows = []
    for token, experts in enumerate(choices):
        mine = [experts[rank] for rank in range(2) if (token, rank) in kept]
        total = sum(probs_TE[token, e] for e in mine)
        rows.append(torch.zeros_like(x_TD[token]))
        for e in mine:
            y_D = block.experts[f"expert_{e}"](x_TD[token])
            rows[-1] = rows[-1] + share * probs_TE[token, e] / total * y_D
    return torch.stack(rows).view_as(hidden)


def with_naive_blocks(model: Any) -> Any:
    for module in model.modules():
        if type(module).__name__ == "NllbMoeSparseMLP":
            module.forward = partial(naive_block, module)
    return model


def limit_capacity(model: Any, capacity: int, fraction: float) -> None:
    for module in model.modules():
        if type(module).__name__ == "NllbMoeTop2Router":
            module.expert_capacity = capacity
            module.moe_eval_capacity_token_fraction = fraction


@pytest.mark.parametrize(("capacity", "mode"), [(64, "host"), (5, "disk")])
def test_the_fixed_routing_equals_a_naive_one(capacity: int, mode: str, tmp_path: Path) -> None:
    """With a capacity of 5 some tokens lose one expert, some both."""
    model = make_model(NLLB).train()
    limit_capacity(model, capacity, 1.0)
    batch = make_batch(NLLB, model)
    with offloaded(model, mode, tmp_path, FIXED) as twin:
        plain = with_naive_blocks(model)
        expected, got = plain(**batch), twin(**batch)
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
        optimizer = overspill.AdamW(twin, max_grad_norm=1e9, **ADAM)
        expected.loss.backward()
        got.loss.backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is None and ".experts." in name:
                parameter.grad = torch.zeros_like(parameter)  # not chosen by any token
        optimizer.step()
        assert_same_gradients(plain, twin, expert_gradients(twin, optimizer))


@pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["switch_transformers", "nllb-moe"])
def test_the_cpu_computes_frozen_experts(name: str, tmp_path: Path) -> None:
    """ReLU, and with NLLB biases, of prompts and in training."""
    family = BY_NAME[name]
    model = make_model(family).train()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in path)
        if path.endswith("bias"):
            parameter.data.normal_()
    # few token rows for each expert: with more the CPU's kernel does not pay
    batch = {key: value[:1, :6].contiguous() for key, value in make_batch(family, model).items()}
    with offloaded(model, "host", tmp_path, cpu_settings(all_on_cpu)) as twin:
        engine = twin.overspill
        engine.recorder.start()
        expected, got = model(**batch), twin(**batch)
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=2e-5)
        expected.loss.backward()
        got.loss.backward()
        assert_same_gradients(model, twin, {})
        jobs = {job.split()[0] for job in cpu_jobs(engine)}
    assert jobs == {"forward", "backward"}


def test_activations_with_parameters_are_refused() -> None:
    model = make_model(BY_NAME["switch_transformers"])
    for module in model.modules():
        if hasattr(module, "act"):
            module.act = nn.PReLU()
    with pytest.raises(ConfigError, match=r"unknown parameter expert_0\.act\.weight \(PReLU\)"):
        overspill.offload(model, device="cpu", mode="host", slots=2, quiet=True)


@torch.no_grad()
def test_the_fixed_routing_equals_a_naive_one_in_inference(tmp_path: Path) -> None:
    model = make_model(NLLB).eval()
    limit_capacity(model, 64, 0.25)  # of the tokens
    for module in model.modules():
        if hasattr(module, "moe_token_dropout"):
            module.moe_token_dropout = 0.25
    batch = make_batch(NLLB, model)
    as_transformers = model(**batch).logits
    with offloaded(model, "host", tmp_path, FIXED) as twin:
        expected = with_naive_blocks(model)(**batch).logits
        torch.testing.assert_close(twin(**batch).logits, expected, rtol=1e-5, atol=2e-5)
    assert (expected - as_transformers).abs().max() > 0.1


def test_nllb_is_offloaded_with_a_warning_that_names_the_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, settings, warnings in (
        ("nllb-moe", None, 1),
        ("nllb-moe", FIXED, 0),
        ("switch_transformers", None, 0),
    ):
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "overspill"),
            offloaded(make_model(BY_NAME[name]), "host", tmp_path, settings),
        ):
            found = [r.getMessage() for r in caplog.records if "fix_nllb_routing" in r.getMessage()]
            assert len(found) == warnings
    with offloaded(make_model(NLLB), "host", tmp_path) as twin:
        overspill.save(twin, tmp_path / "plain")
    caplog.clear()
    model = overspill.load(tmp_path / "plain", **budgets("host", tmp_path))
    model.overspill.close()
    (warning,) = [r for r in caplog.records if "fix_nllb_routing" in r.getMessage()]
    assert "only experts 0 and 1" in warning.getMessage()


def test_a_checkpoint_does_not_depend_on_the_routing(tmp_path: Path) -> None:
    for name, settings in (("plain", None), ("fixed", FIXED)):
        with offloaded(make_model(NLLB), "host", tmp_path, settings) as model:
            overspill.save(model, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "fixed").iterdir())
    for name in files:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "fixed" / name).read_bytes()


def test_the_fixed_routing_of_another_model_is_refused(tmp_path: Path) -> None:
    model = make_model(BY_NAME["mixtral"])
    model.save_pretrained(tmp_path / "mixtral")
    config = GPTConfig(
        vocab=48, n_layers=2, d_model=16, d_hidden=24, n_heads=2, n_experts=4, top_k=1
    )
    for make, kind in (
        (lambda: overspill.offload(copy.deepcopy(model), settings=FIXED), "mixtral"),
        (lambda: overspill.load(tmp_path / "mixtral", settings=FIXED), "mixtral"),
        (lambda: overspill.from_config(model.config, settings=FIXED), "mixtral"),
        (lambda: overspill.offload(overspill.GPTMoE(config), settings=FIXED), "GPTMoE"),
    ):
        with pytest.raises(ConfigError, match=f"for nllb-moe, this model is {kind}"):
            make()
