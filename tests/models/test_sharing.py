"""Conditions in which ranks may compute experts of each other, by their budgets."""

from dataclasses import replace

import pytest
import torch

from overspill.core.experts import ExpertShape
from overspill.models.sharing import place_shared
from overspill.moe.settings import Settings
from overspill.plan.budget import BudgetRequest, ModelSizes
from overspill.tiers.layout import RecordLayout
from overspill.train.config import TrainConfig

GIB = 1 << 30
LAYOUT = RecordLayout(ExpertShape(512, 1024, gated=True), torch.bfloat16, torch.float32)
SIZES = ModelSizes(
    n_layers=8,
    n_experts=16,
    weight_record=LAYOUT.weight_bytes,
    state_record=LAYOUT.state_bytes,
    dense=1 << 20,
    dense_states=0,
    token_bytes=10_000,
    training=True,
)
DEFAULT = BudgetRequest(gpu_memory=GIB, host_memory=16 * GIB, residency=True)
"""Budgets on a GPU that does not hold all experts, without further flags."""


def why_static(request: BudgetRequest, placement: str) -> str | None:
    settings = Settings(placement=placement)
    return place_shared(SIZES, request, settings, LAYOUT, n_experts=32, n_ranks=2)[1]


@pytest.mark.parametrize(
    "request_",
    [DEFAULT, replace(DEFAULT, gpu_memory=20 * GIB), replace(DEFAULT, gpu_memory=GIB // 2)],
    ids=["some fit on the GPU", "all fit", "few fit"],
)
def test_auto_is_static_where_experts_may_live_on_the_gpu(request_: BudgetRequest) -> None:
    why = why_static(request_, "auto")
    assert why is not None
    assert 'give mode="host"' in why


def test_auto_is_dynamic_where_all_experts_stay_in_host_memory() -> None:
    assert why_static(replace(DEFAULT, mode="host"), "auto") is None
    assert why_static(replace(DEFAULT, residency=False), "auto") is None


def test_dynamic_placement_can_be_demanded_with_default_budgets() -> None:
    assert why_static(DEFAULT, "dynamic") is None


def test_the_help_says_that_auto_is_static_by_default() -> None:
    (setting,) = (s for s in TrainConfig.settings() if s.name == "placement")
    assert setting.default == "auto"
    assert "auto: static if experts may live on GPUs, as they may by default" in setting.help
    assert "--mode host" in setting.help
