"""Routing drawn at random: with given shares, with a given imbalance, or with recorded counts.

Shapes: T tokens, L layers, E experts, K top-k.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.core.json_text import parse_json
from overspill.simulate.imbalance import hot_shares, zipf_shares

# A probability of 1 in fixed point: sums are exact, so an expert with probability 1 is never drawn
# twice for one token.
_ONE = 1 << 30


class DrawnRouting:
    """Draws each token's experts so that expert e of layer l gets `shares_LE[l][e]` of the
    assignments.

    A token's experts are distinct, and it has expert e with probability top_k * p_e (systematic
    sampling: K points at distance 1 on the line of cumulative probabilities; no expert's interval
    is longer than 1). With `repeat` the K experts are drawn independently. The same calls after the
    same seed give the same routing.
    """

    def __init__(
        self, shares_LE: Sequence[Sequence[float]], top_k: int, seed: int = 0, repeat: bool = False
    ) -> None:
        if not shares_LE or len({len(shares) for shares in shares_LE}) != 1:
            raise ConfigError("give shares for at least one layer, as many in each")
        self.n_layers = len(shares_LE)
        self.n_experts = len(shares_LE[0])
        self.top_k = top_k
        self.repeat = repeat
        self._seed = seed
        if not 1 <= top_k <= self.n_experts:
            raise ConfigError(f"top_k={top_k} must be from 1 to {self.n_experts}, the experts")
        widths_LE = [self._widths(layer, shares) for layer, shares in enumerate(shares_LE)]
        self._ends_LE = torch.tensor([list(accumulate(widths)) for widths in widths_LE])
        self._on_device: dict[torch.device, tuple[Tensor, torch.Generator]] = {}

    @classmethod
    def with_imbalance(
        cls,
        n_layers: int,
        n_experts: int,
        top_k: int,
        g: float,
        seed: int = 0,
        repeat: bool = False,
        zipf: bool = False,
    ) -> Self:
        """Routing of imbalance `g`, with other popular experts in each layer. The shares are those
        of `hot_shares`, with `zipf` those of `zipf_shares`."""
        if n_layers < 1:
            raise ConfigError(f"n_layers={n_layers} must be at least 1")
        shares = (zipf_shares if zipf else hot_shares)(n_experts, g, top_k, repeat)
        generator = torch.Generator().manual_seed(seed)
        ranks = [torch.randperm(n_experts, generator=generator).tolist() for _ in range(n_layers)]
        return cls([[shares[rank] for rank in layer] for layer in ranks], top_k, seed, repeat)

    @classmethod
    def from_counts(
        cls,
        path: Path | str,
        top_k: int | None = None,
        model: str | None = None,
        domain: str | None = None,
        seed: int = 0,
    ) -> Self:
        """Routing with the shares of the counts in a JSON file. It holds `popularity` [L, E], or
        for each of several models `expert_counts` by domain and layer."""
        counts_LE, recorded = _read_counts(Path(path), model, domain)
        top_k = recorded if top_k is None else top_k
        if top_k is None:
            raise ConfigError(f"{path} does not contain top_k; give top_k")
        return cls(counts_LE, top_k, seed)

    def _widths(self, layer: int, shares: Sequence[float]) -> list[int]:
        """The probabilities of the experts in fixed point; their sum is exactly top_k."""
        whole = math.fsum(shares)
        if not (math.isfinite(whole) and whole > 0 and min(shares) >= 0):
            raise ConfigError(f"the shares of layer {layer} must be at least 0, and some above it")
        total = self.top_k * _ONE
        widest = total if self.repeat else _ONE
        largest = max(shares) / whole
        if largest * self.top_k > 1 + 1e-9 and not self.repeat:
            raise ConfigError(
                f"an expert of layer {layer} has {largest:.4g} of the assignments; with "
                f"top_k={self.top_k} distinct experts it can have {1 / self.top_k:.4g} at most; "
                "give another top_k, or repeat=True"
            )
        widths = [min(widest, int(share / whole * total)) for share in shares]
        left = total - sum(widths)  # the rounding error goes to the most popular experts
        for expert in sorted(range(len(shares)), key=lambda e: -shares[e]):
            extra = min(left, widest - widths[expert])
            widths[expert] += extra
            left -= extra
        assert left == 0
        return widths

    def shares(self, layer: int) -> list[float]:
        """Each expert's share of the assignments of a layer."""
        ends = self._ends_LE[layer]
        widths: list[int] = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        return [width / (self.top_k * _ONE) for width in widths]

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> Tensor:
        ends_LE, generator = self._on(device)
        total = self.top_k * _ONE
        shape = (n_tokens, self.top_k if self.repeat else 1)
        points = torch.randint(total, shape, generator=generator, device=device)
        if not self.repeat:
            points = (points + torch.arange(0, total, _ONE, device=device)) % total
        return torch.searchsorted(ends_LE[layer], points, right=True)

    def _on(self, device: torch.device) -> tuple[Tensor, torch.Generator]:
        if device not in self._on_device:
            generator = torch.Generator(device).manual_seed(self._seed)
            self._on_device[device] = (self._ends_LE.to(device), generator)
        return self._on_device[device]


def _read_counts(
    path: Path, model: str | None, domain: str | None
) -> tuple[list[list[float]], int | None]:
    """Counts [L, E], and top_k if the file has it."""
    try:
        file = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a JSON file of counts ({error})") from error
    if isinstance(file, dict) and "popularity" in file:
        return file["popularity"], file.get("top_k")
    chosen = _choose(path, "model", file, model)
    by_domain = chosen.get("expert_counts") if isinstance(chosen, dict) else None
    if not isinstance(by_domain, dict):
        raise ConfigError(f"{path} has no counts: neither `popularity` nor `expert_counts`")
    by_layer = _choose(path, "domain", by_domain, domain)
    return [by_layer[layer] for layer in sorted(by_layer, key=int)], None


def _choose(path: Path, what: str, options: Any, name: str | None) -> Any:
    if not isinstance(options, dict) or name not in options:
        names = ", ".join(options) if isinstance(options, dict) else "none"
        raise ConfigError(f"{path} has no {what} {name}; give one of: {names}")
    return options[name]
