"""Models that cannot run with offloaded experts are refused by name: nothing is run dense in
silence."""

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.core.errors import ConfigError
from tests.models.huggingface.families import (
    FAMILIES,
    UNEVEN,
    Family,
    cases,
    make_model,
)
from tests.models.huggingface.refused import REFUSED
from tests.models.huggingface.test_exactness import UNSUPPORTED


@pytest.mark.parametrize("family", cases(REFUSED))
def test_other_experts_are_refused_by_name(family: Family, tmp_path: Path) -> None:
    model = make_model(family)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=model.config.model_type):
        overspill.offload(model, device="cpu", quiet=True)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=model.config.model_type):
        overspill.load(tmp_path, device="cpu", quiet=True)


@pytest.mark.parametrize(
    "family", cases(tuple(family for family in FAMILIES if family.name in UNSUPPORTED))
)
def test_norm_after_experts_is_refused(family: Family) -> None:
    with pytest.raises(ConfigError, match="norm after each expert"):
        overspill.offload(make_model(family), device="cpu", quiet=True)


@pytest.mark.parametrize("family", cases(UNEVEN))
def test_layers_with_different_experts_are_refused(family: Family) -> None:
    with pytest.raises(ConfigError, match="layers with different experts are not supported"):
        overspill.offload(make_model(family), device="cpu", quiet=True)


def mixtral() -> Any:
    return make_model(next(family for family in FAMILIES if family.name == "mixtral"))


def test_layers_that_share_their_experts_are_refused() -> None:
    model = mixtral()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp.* share their experts"):
        overspill.offload(model, device="cpu", quiet=True)


def test_more_experts_for_a_token_than_there_are_is_refused(tmp_path: Path) -> None:
    model = mixtral()
    model.config.num_experts_per_tok = 5
    model.save_pretrained(tmp_path)
    message = "num_experts_per_tok=5 is more than the 4 experts of each layer"
    with pytest.raises(ConfigError, match=message):
        overspill.load(tmp_path, device="cpu", quiet=True)
    with pytest.raises(ConfigError, match=message):
        overspill.LLM(tmp_path, device="cpu")


def test_a_parameter_that_experts_do_not_have_is_refused() -> None:
    model = mixtral()
    model.model.layers[1].mlp.experts.scale = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="has an unknown parameter scale"):
        overspill.offload(model, device="cpu", quiet=True)


def test_experts_over_ranks_are_refused() -> None:
    model = mixtral()
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(ConfigError, match="split over ranks"):
        overspill.offload(model, device="cpu", quiet=True)
