"""Pre-gates of transformers models: exact, trained and served."""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.core.errors import ConfigError, OrderError
from overspill.models.pregate import pregate_level
from overspill.moe.dense_weights import DenseWeights
from tests.models.huggingface.families import (
    FAMILIES,
    UNEVEN,
    Family,
    different_cases,
    make_batch,
    make_model,
)
from tests.models.huggingface.oracle import (
    ADAM,
    MODES,
    assert_same_gradients,
    assert_same_weights,
    budgets,
    expert_gradients,
    offloaded,
)
from tests.models.huggingface.pregated import DEEP, call_by_hand
from tests.slow import slow_rows

DEEP_BY_NAME = {family.name: family for family in DEEP}
BY_NAME = {family.name: family for family in FAMILIES}
REFUSED = ("zaya",)
ENCODER_DECODERS = ("switch_transformers", "nllb-moe")
SUPPORTED = tuple(
    DEEP_BY_NAME.get(family.name, family) if family.name in ENCODER_DECODERS else family
    for family in (*FAMILIES, *UNEVEN)
    if family.name not in REFUSED
)
MIXTRAL = DEEP_BY_NAME["mixtral"]


def gradients_of(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor], atol: float = 0.0) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=atol, atol=atol, msg=name)


@torch.no_grad()
def logits_of(model: Any, family: Family = MIXTRAL) -> Tensor:
    batch = make_batch(family, model)
    return model.eval()(**batch).logits


@contextmanager
def closing(model: Any) -> Iterator[Any]:
    try:
        yield model
    finally:
        model.overspill.close()


# -- exactness -----------------------------------------------------------------------------------


LEVELS = {
    "mixtral": [1, 2, 3],
    "qwen3_moe": [1],
    "deepseek_v3": [3],
    "gpt_oss": [2],
    "switch_transformers": [2],
    "nllb-moe": [2],
}
SLOW_LEVELS = [  # as others
    ("mixtral", 1), ("mixtral", 3), ("qwen3_moe", 1), ("gpt_oss", 2), ("switch_transformers", 2),
    ("nllb-moe", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "level"),
    [
        pytest.param(
            family,
            level,
            id=f"{family.name}-{level}",
            marks=[pytest.mark.slow] if (family.name, level) in SLOW_LEVELS else [],
        )
        for family in DEEP
        for level in LEVELS[family.name]
    ],
)
def test_training_follows_gates_that_are_called_by_hand(
    family: Family, level: int, tmp_path: Path
) -> None:
    """Two steps with offloaded experts: each family in each mode, before and after offloading, with
    and without checkpoints."""
    number = DEEP.index(family) + level
    mode, first, recompute = list(MODES)[number % 3], number % 2 == 0, number % 4 < 2
    model = make_model(family).train()
    plain = call_by_hand(copy.deepcopy(model), level)
    batch = make_batch(family, plain)
    if first:
        overspill.pregate(model, level)
    with offloaded(model, mode, tmp_path) as twin:
        if not first:
            overspill.pregate(twin, level)
        if recompute:
            twin.gradient_checkpointing_enable()
        assert pregate_level(twin) == level
        theirs = torch.optim.AdamW(plain.parameters(), **ADAM)
        mine = overspill.AdamW(twin, max_grad_norm=1e9, **ADAM)
        for step in range(2):
            expected, got = plain(**batch), twin(**batch)
            # the optimizers round differently
            atol = (1e-5 + 2e-5 * step) * float(expected.logits.detach().abs().max())
            torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=atol)
            torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
            expected.loss.backward()
            got.loss.backward()
            for name, parameter in plain.named_parameters():
                if parameter.grad is None and ".experts." in name:
                    parameter.grad = torch.zeros_like(parameter)  # it decays too
            theirs.step()
            mine.step()
            if step == 0:
                assert_same_gradients(plain, twin, expert_gradients(twin, mine))
            assert_same_weights(plain, twin, atol=1e-5)
            theirs.zero_grad()
            mine.zero_grad()


# gates do not depend on mixers
MIXERS = ("kimi_linear", "lfm2_moe", "minimax", "mistral4", "qwen3_next")


@pytest.mark.parametrize("family", different_cases(SUPPORTED, *MIXERS))
def test_every_family_follows_gates_that_are_called_by_hand(family: Family) -> None:
    model = make_model(family).train()
    batch = make_batch(family, model)
    plain = call_by_hand(copy.deepcopy(model), 1)
    kind = str(type(model))
    overspill.pregate(model)
    assert str(type(model)) == kind  # by which transformers knows it
    expected = gradients_of(plain, batch)
    assert_equal(gradients_of(model, batch), expected)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
        assert_equal(gradients_of(model, batch), expected, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_other_families_are_refused_unchanged(name: str) -> None:
    model = make_model(BY_NAME[name])
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=r"cannot have (a pre-gate|pre-gates)"):
        overspill.pregate(model)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("name", ["encoder_layerdrop", "decoder_layerdrop"])
def test_layer_drop_is_refused(name: str) -> None:
    model = make_model(DEEP_BY_NAME["nllb-moe"])
    setattr(model.config, name, 0.05)
    with pytest.raises(ConfigError, match=rf"may be dropped in training \({name}=0.05\).*{name}=0"):
        overspill.pregate(model)
    assert pregate_level(model) == 0


def test_a_stack_with_one_moe_block_is_refused_unchanged() -> None:
    model = make_model(BY_NAME["switch_transformers"])  # the decoder has two
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(
        ConfigError, match=r"level=1 needs at least 2 .* of encoder.block.1.*has 1: "
    ):
        overspill.pregate(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_level_beyond_the_shorter_stack_is_refused_by_its_name() -> None:
    family = DEEP_BY_NAME["nllb-moe"]
    model = make_model(dataclasses.replace(family, build=lambda: _shorter(family)))
    with pytest.raises(
        ConfigError, match=r"level=4 needs at least 5 .* of model\.decoder\..*has 2: give at most 1"
    ):
        overspill.pregate(model, 4)
    assert pregate_level(model) == 0


def _shorter(family: Family) -> Any:
    """Its decoder has two MoE blocks."""
    config: Any = family.build()
    config.decoder_layers = 2
    return config


def test_jitter_changes_the_input_of_the_gate_alone() -> None:
    """Gates of Switch multiply their input in place, that of the experts with it."""
    model = make_model(DEEP_BY_NAME["switch_transformers"]).train()
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.5
    overspill.pregate(model)
    inputs: list[tuple[Tensor, Tensor]] = []
    block = model.encoder.block[1].layer[1].mlp
    block.register_forward_pre_hook(lambda _, args: inputs.append((args[0], args[0].clone())))
    model(**make_batch(DEEP_BY_NAME["switch_transformers"], model))
    for given, before in inputs:
        assert torch.equal(given, before)


def test_the_balance_loss_is_that_of_the_gates_in_use() -> None:
    model = make_model(MIXTRAL).train()
    batch = make_batch(MIXTRAL, model) | {"output_router_logits": True}
    plain = copy.deepcopy(model)
    before = plain(**batch).aux_loss  # installs the hooks that record logits
    call_by_hand(plain, 2)
    overspill.pregate(model, 2)
    expected, got = plain(**batch), model(**batch)
    assert got.aux_loss == expected.aux_loss != before
    for mine, theirs in zip(got.router_logits, expected.router_logits, strict=True):
        assert torch.equal(mine, theirs)
    assert_equal(gradients_of(model, batch), gradients_of(plain, batch))


def test_checkpoints_may_be_enabled_before() -> None:
    model = make_model(MIXTRAL).train()
    batch = make_batch(MIXTRAL, model)
    expected = gradients_of(call_by_hand(copy.deepcopy(model), 1), batch)
    model.gradient_checkpointing_enable()
    assert_equal(gradients_of(overspill.pregate(model), batch), expected)


def test_reentrant_checkpoints_are_refused() -> None:
    model = overspill.pregate(make_model(MIXTRAL).train())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(OrderError, match="use_reentrant=False"):
        model(**make_batch(MIXTRAL, model))


@pytest.mark.parametrize("name", slow_rows(["mixtral", "switch_transformers"], 0))
def test_generation_with_a_cache(name: str, tmp_path: Path) -> None:
    family = DEEP_BY_NAME[name]
    model = make_model(family).eval()
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 64  # transformers from 5.22 on counts tokens of a pass
    ids = make_batch(family, model)["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    conventional = model.generate(ids, **options)
    overspill.pregate(model, 2)
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert not torch.equal(expected, conventional)
    with closing(overspill.offload(model, **budgets("host", tmp_path))) as twin:
        assert torch.equal(twin.generate(ids, **options), expected)


def test_a_pre_gate_copies_no_dense_weights_of_its_own_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense weights in host memory are copied block by block; this gate consists of modules."""
    family = BY_NAME["hunyuan_v1_moe"]
    copied: list[str] = []
    copy_block = DenseWeights._copy

    def counted(self: DenseWeights, block: Any) -> Any:
        copied.append(block.name)
        return copy_block(self, block)

    monkeypatch.setattr(DenseWeights, "_copy", counted)
    with offloaded(make_model(family).eval(), "disk", tmp_path) as model:
        logits_of(model, family)
        expected, copied = copied, []
        overspill.pregate(model)
        logits_of(model, family)
    assert sorted(copied) == sorted(expected)


def test_the_decoder_inside_may_be_called_by_itself() -> None:
    model = overspill.pregate(make_model(MIXTRAL))
    hidden = model.model(make_batch(MIXTRAL, model)["input_ids"]).last_hidden_state
    torch.testing.assert_close(model.lm_head(hidden), logits_of(model))


def test_an_llm_serves_the_pre_gated_model(tmp_path: Path) -> None:
    model = overspill.pregate(make_model(MIXTRAL).eval())
    prompt = make_batch(MIXTRAL, model)["input_ids"][:1]
    (expected,) = model.generate(prompt, max_new_tokens=5, do_sample=False)
    overspill.save(model, tmp_path / "out")
    with overspill.LLM(tmp_path / "out", device="cpu") as llm:
        params = overspill.SamplingParams(max_tokens=5, temperature=0.0)
        (result,) = llm.generate([prompt[0].tolist()], params)
    assert result.token_ids == expected[prompt.shape[1] :].tolist()


def test_a_served_model_gets_no_pre_gates(tmp_path: Path) -> None:
    """Its LLM has keys and values of the conventional model."""
    model = overspill.offload(make_model(MIXTRAL).eval(), **budgets("host", tmp_path))
    params = overspill.SamplingParams(max_tokens=3, temperature=0.0)
    with closing(model):
        with overspill.LLM(model, context=64) as llm:
            llm.generate([[1, 2, 3]], params)
            with pytest.raises(OrderError, match="being served; close its LLM"):
                overspill.pregate(model)
            assert pregate_level(model) == 0
        overspill.pregate(model)
        with overspill.LLM(model, context=64) as llm:
            llm.generate([[1, 2, 3]], params)
