"""A routing source replaces the routers of a model within a block."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import overspill
from overspill.core.errors import ConfigError
from overspill.core.routing import RoutingSource
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.simulate import DrawnRouting, ReplayedRouting, routed_by
from tests.simulate.recordings import trace_of


@pytest.fixture(scope="module")
def model() -> Iterator[GPTMoE]:
    config = GPTConfig(
        vocab=32, n_layers=3, d_model=8, d_hidden=8, n_heads=2, n_experts=5, top_k=2, max_seq=8
    )
    model = GPTMoE(config, checkpoint=False)
    overspill.offload(model, device="cpu", mode="gpu", quiet=True)
    yield model
    model.overspill.close()


def placeholders(model: GPTMoE) -> list[ExpertPlaceholder]:
    return [p for p in model.parameters() if isinstance(p, ExpertPlaceholder)]


def sources(model: GPTMoE) -> list[RoutingSource | None]:
    return [placeholder.source for placeholder in placeholders(model)]


def test_a_source_is_used_within_the_block_only(model: GPTMoE) -> None:
    outer = DrawnRouting.with_imbalance(3, 5, 2, 0.3)
    inner = ReplayedRouting(trace_of(10, n_layers=4, n_experts=5))
    assert sources(model) == [None] * 3

    def fail_inside() -> None:
        with routed_by(model, inner):
            assert sources(model) == [inner] * 3
            raise RuntimeError("on purpose")

    with routed_by(model, outer):
        with pytest.raises(RuntimeError, match="on purpose"):
            fail_inside()
        assert sources(model) == [outer] * 3
    assert sources(model) == [None] * 3


@pytest.mark.parametrize(
    ("n_layers", "n_experts", "top_k", "message"),
    [
        (2, 5, 2, "has 2 MoE layers, the model 3"),
        (3, 4, 2, "has 4 experts per layer, the model 5"),
        (3, 6, 2, "has 6 experts per layer, the model 5"),
        (3, 5, 1, "has 1 experts per token, the model 2"),
    ],
)
def test_a_source_of_another_shape_is_refused(
    model: GPTMoE, n_layers: int, n_experts: int, top_k: int, message: str
) -> None:
    source = DrawnRouting.with_imbalance(n_layers, n_experts, top_k, 0.3)
    with (
        pytest.raises(ConfigError, match=message),
        routed_by(model, source),
        torch.no_grad(),
    ):
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert sources(model) == [None] * 3


def test_a_model_without_offloaded_experts_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"overspill\.offload"),
        routed_by(nn.Linear(2, 2), DrawnRouting.with_imbalance(1, 4, 2, 0.3)),
    ):
        pass


def test_the_ids_of_the_router_are_replaced(model: GPTMoE) -> None:
    source = ReplayedRouting(trace_of(10, n_experts=5), 5)
    layer, ids = placeholders(model)[1], torch.zeros(4, 2, dtype=torch.int64)
    assert layer.reroute(ids) is ids
    with routed_by(model, source):
        assert torch.equal(layer.reroute(ids), source.sequence(0)[:4, 1])
