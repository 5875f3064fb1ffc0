"""Pre-gates of transformers models: exact, saved beside the conventional model, loaded again."""

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import overspill
from overspill.core.errors import CheckpointError, ConfigError, OrderError
from overspill.models.huggingface.pregates import FILE, gate_tensors
from overspill.models.pregate import pregate_level
from tests.models.huggingface.families import (
    FAMILIES,
    UNEVEN,
    Family,
    cases,
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

DEEP_BY_NAME = {family.name: family for family in DEEP}
BY_NAME = {family.name: family for family in FAMILIES}
REFUSED = ("zaya", "nllb-moe")
SUPPORTED = tuple(
    DEEP_BY_NAME.get(family.name, family) if family.name == "switch_transformers" else family
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


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("family", DEEP, ids=lambda family: family.name)
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
            atol = 1e-5 * float(expected.logits.detach().abs().max())
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


@pytest.mark.parametrize("family", cases(SUPPORTED))
def test_every_family(family: Family, tmp_path: Path) -> None:
    """Losses and gradients with and without checkpoints; both models after saving and loading."""
    conventional = make_model(family).train()
    batch = make_batch(family, conventional)
    plain = call_by_hand(copy.deepcopy(conventional), 1)
    model = overspill.pregate(copy.deepcopy(conventional))
    assert str(type(model)) == str(type(conventional))
    expected = gradients_of(plain, batch)
    assert_equal(gradients_of(model, batch), expected)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
        assert_equal(gradients_of(model, batch), expected, atol=1e-5)
    if family.name == "ernie4_5_vl_moe":
        return  # overspill.load refuses it
    changed = {name: tensor * 0.5 for name, tensor in gate_tensors(model).items()}
    model.load_state_dict(changed, strict=False)
    overspill.save(model, tmp_path / "out")
    again = overspill.load(tmp_path / "out", train=False, **budgets("gpu", tmp_path))
    with closing(again):
        torch.testing.assert_close(logits_of(again, family), logits_of(model, family))
    auto = getattr(transformers, family.auto)
    loaded = auto.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert_equal(loaded.state_dict(), conventional.state_dict())
