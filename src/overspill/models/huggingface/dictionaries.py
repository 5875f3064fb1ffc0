"""Switch and NLLB: experts in module dictionaries.

Each passes the routing to its experts in its own form, which is read here as the eager code of
transformers reads it. Shapes: T tokens, D model, E experts, K top-k.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overspill.compute.dropout import Dropout
from overspill.moe.autograd import routed_experts
from overspill.moe.placeholder import ExpertPlaceholder, check_placeholder
from overspill.moe.pregate import check_selected
from overspill.moe.settings import Settings

_log = logging.getLogger("overspill")

Routing = tuple[Tensor, Tensor]
"""Expert ids [T, K], with E for none, and their weights [T, K]."""


@dataclass(frozen=True)
class DictionaryStyle:
    """Differences between Switch and NLLB."""

    linears: tuple[str, str]
    bias: bool
    read: Callable[[Tensor, Tensor, int], Routing]
    std: Callable[[Any], float]
    """Standard deviation of initial weights, from the config."""


def read_switch(selected: Tensor, weights: Tensor, n_experts: int) -> Routing:
    """Return the routing of Switch: `selected` [T, 1, E] is one-hot, all zeros for a token beyond
    the capacity."""
    ids = read_mask(selected)
    return ids, weights.view_as(ids)


def read_mask(selected: Tensor) -> Tensor:
    """Return the ids of a one-hot mask; E for a row of zeros."""
    chosen = selected.bool()
    return torch.where(chosen.any(-1), chosen.to(torch.uint8).argmax(-1), selected.shape[-1])


def read_nllb(selected: Tensor, weights: Tensor, n_experts: int) -> Routing:
    """Return the routing of NLLB: element j of a token's row of `selected` [T, E] is an expert id,
    with weight j.

    The router passes the one-hot mask of the token's first expert, so the ids are 0 and 1, and only
    these two experts compute. transformers (5.17 to 5.22) computes the same. Weights of the same
    expert are added up.
    """
    ids_TE = selected.long()
    total_TE = torch.zeros_like(weights).scatter_add(1, ids_TE, weights)
    used_TE = torch.zeros_like(ids_TE).scatter(1, ids_TE, 1)
    used_TK, ids_TK = used_TE.topk(min(2, n_experts), dim=1)  # ids are 0 and 1
    weights_TK = total_TE.gather(1, ids_TK)
    return torch.where(used_TK > 0, ids_TK, n_experts), weights_TK


def read_nllb_top_2(selected: Tensor, weights: Tensor, n_experts: int) -> Routing:
    """Return the routing that NLLB-MoE was trained with: `weights` [T, E] are the weights of the
    token's two experts, zero for the others and beyond an expert's capacity. `selected`, the mask
    of the first one, is not used."""
    weights_TK, ids_TK = weights.topk(min(2, n_experts), dim=1)
    return torch.where(weights_TK > 0, ids_TK, n_experts), weights_TK


SWITCH = DictionaryStyle(
    linears=("wi", "wo"),
    bias=False,
    read=read_switch,
    std=lambda config: float(config.initializer_factor * config.d_model**-0.5),
)
NLLB = DictionaryStyle(
    linears=("fc1", "fc2"),
    bias=True,
    read=read_nllb,
    std=lambda config: float(config.init_std),
)
DROPOUT = "dropout"
"""Name of the dropout module of the experts in a dictionary whose experts are offloaded."""
_STYLES_BY_CLASS = {"SwitchTransformersExperts": SWITCH, "NllbMoeExperts": NLLB}
_ROUTERS = ("SwitchTransformersTop1Router", "NllbMoeTop2Router")


def style_of(module: nn.Module) -> DictionaryStyle | None:
    """Return the style of an experts dictionary, offloaded or not; None for other modules."""
    if isinstance(module, HostedDictionary):
        return module.style
    return _STYLES_BY_CLASS.get(type(module).__name__)


def cast_routers(model: nn.Module) -> None:
    """Converts the weights of routers to the dtype that routers compute in. The first forward would
    do so, when optimizers and checkpoints know the other dtype already."""
    for module in model.modules():
        if type(module).__name__ in _ROUTERS:
            classifier, dtype = module.classifier, module.dtype
            assert isinstance(classifier, nn.Module)
            assert isinstance(dtype, torch.dtype)
            classifier.to(dtype)


@contextmanager
def capacities_kept(model: nn.Module) -> Iterator[None]:
    """Context in which the model may evaluate. Otherwise a router of NLLB would keep the capacity
    of the last batch that it has evaluated, and drop tokens of training batches beyond it."""
    routers: list[Any] = [m for m in model.modules() if type(m).__name__ in _ROUTERS]
    before = [router.expert_capacity for router in routers]
    try:
        yield
    finally:
        for router, capacity in zip(routers, before, strict=True):
            router.expert_capacity = capacity


def warn_of_routing(settings: Settings) -> None:
    """Log a warning that an NLLB-MoE has the routing of transformers."""
    if not settings.fix_nllb_routing:
        _log.warning(
            "nllb-moe computes as in transformers, which takes the one-hot mask of a token for the "
            "ids of its experts: only experts 0 and 1 of each layer are used. For the top-2 "
            "routing that it was trained with, give "
            "settings=overspill.Settings(fix_nllb_routing=True), or --fix-nllb-routing"
        )


class HostedDictionary(nn.ModuleDict):
    """Class of an experts dictionary whose experts are offloaded."""

    style: DictionaryStyle
    overspill: ExpertPlaceholder
    before_forward: Callable[[], bool] | None = None
    """Function that forwards call until it returns True. Not a hook, which a CUDA graph would not
    allow."""

    @staticmethod
    def of(style: DictionaryStyle) -> type["HostedDictionary"]:
        return _HostedSwitch if style is SWITCH else _HostedNllb

    def read(self, selected: Tensor, weights: Tensor) -> Routing:
        engine = self.overspill.engine
        fixed = self.style is NLLB and engine.settings.fix_nllb_routing
        read = read_nllb_top_2 if fixed else self.style.read
        return read(selected, weights, engine.n_experts)

    def forward(self, hidden_states: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
        check_placeholder(self.overspill)
        check_selected(self, selected)
        if self.before_forward is not None and self.before_forward():
            self.before_forward = None
        engine = self.overspill.engine
        ids_TK, weights_TK = self.read(selected, weights)
        fraction: Any = getattr(self, "moe_token_dropout", 0)
        if fraction and not self.training:
            weights_TK = weights_TK * (1 - fraction)
        # the routing weight of a dropped token gets no gradient
        weights_TK = torch.where(ids_TK < engine.n_experts, weights_TK, 0)
        x_TD = hidden_states.to(engine.dtype)
        output = _rate(self["token_dropout"]) if fraction else 0.0
        dropout = Dropout.draw(_rate(self[DROPOUT]), output)
        args = self.overspill, x_TD, ids_TK, weights_TK, dropout
        return routed_experts(*args).to(hidden_states.dtype)


def _rate(dropout: nn.Module) -> float:
    """Return the rate of a dropout module, as it is now."""
    return float(dropout.p) if dropout.training else 0.0  # type: ignore[arg-type]


class _HostedSwitch(HostedDictionary):
    style = SWITCH


class _HostedNllb(HostedDictionary):
    style = NLLB
