"""Costs for dynamic placement are measured on the device that computes."""

import torch

from overspill.core.experts import ExpertShape
from overspill.models.placement_costs import measured_costs
from overspill.plan.placement import dynamic_rows, static_rows
from overspill.tiers.layout import RecordLayout


def test_measured_costs_plan_a_layer() -> None:
    layout = RecordLayout(ExpertShape(d_model=16, d_hidden=24, gated=True), torch.float32)
    costs = measured_costs(layout, torch.device("cpu"), rows=64)
    assert 0 < costs.wait < costs.upload
    assert costs.row > 0
    tokens = [10**9, 0, 0, 0]  # so many that balancing pays
    assert dynamic_rows(tokens, 2, costs).sum(1).tolist() == [5 * 10**8] * 2
    assert static_rows(tokens, 2).sum(1).tolist() == [10**9, 0]
