"""Switch and NLLB: dictionaries of experts with routing of their own kind.

Both hand their experts a routing in a form of their own; what it means is taken from what their
eager code does with it, not from what it is called. Shapes: T tokens, D model, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overspill.moe.autograd import routed_experts
from overspill.moe.placeholder import ExpertPlaceholder

Routing = tuple[Tensor, Tensor]
"""Expert ids [T, K], with E for none, and their weights [T, K]."""


@dataclass(frozen=True)
class Style:
    """What differs between the two."""

    linears: tuple[str, str]
    bias: bool
    read: Callable[[Tensor, Tensor, int], Routing]
    dropouts: tuple[str, ...]
    """Fields of the config that put dropout inside experts."""


def read_switch(selected: Tensor, weights: Tensor, n_experts: int) -> Routing:
    """`selected` [T, 1, E] is one-hot, all zeros for a token beyond the capacity."""
    chosen = selected.bool()
    ids = torch.where(chosen.any(-1), chosen.to(torch.uint8).argmax(-1), n_experts)
    return ids, weights.view_as(ids)


def read_nllb(selected: Tensor, weights: Tensor, n_experts: int) -> Routing:
    """Place j of a token's row [E] goes to the expert numbered by its *value*, with weight j.

    The router gives a one-hot mask, so the values are 0 and 1, and those two experts do all the
    work. That is what transformers computes (5.17 to 5.22), and so do we. Places with the same
    expert are added up: an expert sees a token once.
    """
    ids_TE = selected.long()
    total_TE = torch.zeros_like(weights).scatter_add(1, ids_TE, weights)
    here_TE = torch.zeros_like(ids_TE).scatter(1, ids_TE, 1)
    top_k = int(here_TE.sum(1).max()) if len(here_TE) else 1
    here_TK, ids_TK = here_TE.topk(top_k, dim=1)
    weights_TK = total_TE.gather(1, ids_TK)
    return torch.where(here_TK > 0, ids_TK, n_experts), weights_TK


SWITCH = Style(("wi", "wo"), False, read_switch, ("dropout_rate",))
NLLB = Style(("fc1", "fc2"), True, read_nllb, ("activation_dropout", "moe_token_dropout"))
STYLES = {"switch_transformers": SWITCH, "nllb-moe": NLLB}


def dropouts_inside_experts(config: Any) -> dict[str, float]:
    """Fields of a model's config that put dropout inside its experts, with what they should be to
    train it here."""
    style = STYLES.get(config.model_type)
    return {name: 0.0 for name in style.dropouts if getattr(config, name)} if style else {}


class HostedDictionary(nn.ModuleDict):
    """The class of an experts dictionary once its experts are with an engine."""

    style: Style
    overspill: ExpertPlaceholder

    @staticmethod
    def of(style: Style) -> type["HostedDictionary"]:
        return _HostedSwitch if style is SWITCH else _HostedNllb

    def forward(self, hidden_states: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
        engine = self.overspill.engine
        ids_TK, weights_TK = self.style.read(selected, weights, engine.n_experts)
        fraction: Any = getattr(self, "moe_token_dropout", 0)
        if fraction and not self.training:
            weights_TK = weights_TK * (1 - fraction)
        # a dropped token's weight must not learn from an expert it did not see
        weights_TK = torch.where(ids_TK < engine.n_experts, weights_TK, 0)
        x_TD = hidden_states.to(engine.dtype)
        return routed_experts(self.overspill, x_TD, ids_TK, weights_TK).to(hidden_states.dtype)


class _HostedSwitch(HostedDictionary):
    style = SWITCH


class _HostedNllb(HostedDictionary):
    style = NLLB
