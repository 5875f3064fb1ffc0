"""Imbalance of the tokens of experts, and shares of a given imbalance."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.core.errors import ConfigError

_MAX_EXPONENT = 1e6  # a Zipf exponent that leaves nothing for the experts below the top


def imbalance(counts_LE: Tensor | Sequence[Sequence[float]]) -> float:
    """G of APTMoE's equation 2: the sum of the squared shares of a layer's assignments, averaged
    over layers. It is 1/E for an even load and 1 if one expert gets everything."""
    counts = torch.as_tensor(counts_LE, dtype=torch.float64)
    totals = counts.sum(-1, keepdim=True)
    if counts.dim() != 2 or not bool((totals > 0).all()):
        raise ConfigError(
            f"counts of shape {list(counts.shape)} have no imbalance; give [layers, experts] with "
            "an assignment in each layer"
        )
    return float((counts / totals).square().sum(-1).mean())


def zipf_shares(n_experts: int, g: float, top_k: int = 1, repeat: bool = False) -> list[float]:
    """Shares p_e ∝ e^-s of the assignments whose squares sum to `g`, in descending order.

    A token selects an expert at most once, so no share exceeds 1/top_k: larger ones are clipped,
    and the remaining experts share the rest. With `repeat` a token may select an expert repeatedly.
    """
    n_hot = _hot_experts(n_experts, g, top_k, repeat)
    low, high = 0.0, _MAX_EXPONENT
    for _ in range(200):
        middle = (low + high) / 2
        if sum(p * p for p in _capped_zipf(n_experts, middle, n_hot)) < g:
            low = middle
        else:
            high = middle
    return _capped_zipf(n_experts, high, n_hot)


def hot_shares(n_experts: int, g: float, top_k: int = 1, repeat: bool = False) -> list[float]:
    """Equal shares of `top_k` hot experts and equal, smaller shares of all others, with the sum of
    squares `g`. This resembles the counts of trained models: in OLMoE the least used expert gets
    about a third of the mean, where a Zipf distribution leaves it almost nothing.
    """
    n_hot = _hot_experts(n_experts, g, top_k, repeat)
    even, most = 1 / n_experts, 1 / n_hot
    hot = 1.0 if most == even else math.sqrt(max(0.0, g - even) / (most - even))
    hot = min(1.0, hot)
    base = (1 - hot) * even
    return [base + hot * most] * n_hot + [base] * (n_experts - n_hot)


def _hot_experts(n_experts: int, g: float, top_k: int, repeat: bool) -> int:
    """The least number of distinct experts of a token. Raises if no shares give `g`."""
    if not 1 <= top_k <= n_experts:
        raise ConfigError(f"top_k={top_k} must be from 1 to the number of experts, {n_experts}")
    n_hot = 1 if repeat else top_k
    even, most = 1 / n_experts, 1 / n_hot
    if not even * (1 - 1e-9) <= g:
        raise ConfigError(
            f"G={g} is below 1/{n_experts} = {even:.4g}, the value of an even load on {n_experts} "
            "experts; give at least that"
        )
    if not g <= most * (1 + 1e-9):
        raise ConfigError(_too_uneven(g, top_k, n_hot))
    return n_hot


def _too_uneven(g: float, top_k: int, n_hot: int) -> str:
    if n_hot == 1:
        return f"G={g} is above 1, where one expert gets every token; give at most 1"
    return (
        f"G={g} is above 1/{top_k} = {1 / top_k:.4g}: with top_k={top_k} a token would have to "
        "select one expert twice; give at most that, or repeat=True, which allows it"
    )


def _capped_zipf(n_experts: int, s: float, n_hot: int) -> list[float]:
    cap = 1 / n_hot
    for full in range(n_hot):
        # relative to the first that is not full, so that a large exponent does not underflow
        weights = [(rank / (full + 1)) ** -s for rank in range(full + 1, n_experts + 1)]
        scale = (1 - full * cap) / sum(weights)
        if scale <= cap:
            break
    return [cap] * full + [min(cap, weight * scale) for weight in weights]
