"""Routing that does not come from a gate: drawn with a wanted imbalance, or replayed from a record.

Random weights route almost evenly; what depends on popular experts is measured with these.

Shapes: T tokens, L layers, E experts, K top-k.
"""

import json
import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.moe.router import Router

# Probabilities are whole numbers of this part of a place: sums are exact, so that an expert that
# every token has is never drawn twice for one.
_UNIT = 1 << 30
_STEEPEST = 1e6  # a Zipf exponent under which nothing is left for the experts below the top


class RoutingSource(Protocol):
    """Stands in for the gates of a model."""

    n_layers: int
    n_experts: int
    top_k: int

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> Tensor:
        """The experts of the next tokens of a layer, [T, K] int64; never waits for the device."""


# -- how uneven ---------------------------------------------------------------------------


def imbalance(counts_LE: Tensor | Sequence[Sequence[float]]) -> float:
    """G of APTMoE's equation 2: the squared shares of a layer's assignments, summed over experts,
    mean over layers. 1/E is even, 1 is one expert alone."""
    counts = torch.as_tensor(counts_LE, dtype=torch.float64)
    totals = counts.sum(-1, keepdim=True)
    if counts.dim() != 2 or not bool((totals > 0).all()):
        raise ConfigError(
            f"counts of shape {list(counts.shape)} have no imbalance; give [layers, experts] with "
            "an assignment in each layer"
        )
    return float((counts / totals).square().sum(-1).mean())


def zipf_shares(n_experts: int, g: float, top_k: int = 1, repeat: bool = False) -> list[float]:
    """Shares p_e ∝ e^-s of the assignments whose squares sum to `g`, the largest first.

    A token has an expert once, so no share is above 1/top_k: those that would be stay there, and
    the others share the rest. With `repeat` a token may have the same expert in several places.
    """
    places = _places(n_experts, g, top_k, repeat)
    low, high = 0.0, _STEEPEST
    for _ in range(200):
        middle = (low + high) / 2
        if sum(p * p for p in _capped_zipf(n_experts, middle, places)) < g:
            low = middle
        else:
            high = middle
    return _capped_zipf(n_experts, high, places)


def hot_shares(n_experts: int, g: float, top_k: int = 1, repeat: bool = False) -> list[float]:
    """Shares of a few hot experts, as many as a token has, over a floor that all experts have, with
    the sum of squares `g`. That is how counts of trained models look: the rarest expert has about a
    third of the mean (OLMoE), where Zipf would leave it next to nothing.
    """
    places = _places(n_experts, g, top_k, repeat)
    even, most = 1 / n_experts, 1 / places
    hot = 1.0 if most == even else math.sqrt(max(0.0, g - even) / (most - even))
    hot = min(1.0, hot)
    floor = (1 - hot) * even
    return [floor + hot * most] * places + [floor] * (n_experts - places)


def _places(n_experts: int, g: float, top_k: int, repeat: bool) -> int:
    """How many experts a token has at least; an error if no shares have this sum of squares."""
    if not 1 <= top_k <= n_experts:
        raise ConfigError(f"top_k={top_k} must be from 1 to the number of experts, {n_experts}")
    places = 1 if repeat else top_k
    even, most = 1 / n_experts, 1 / places
    if not even * (1 - 1e-9) <= g:
        raise ConfigError(
            f"G={g} is below 1/{n_experts} = {even:.4g}, where {n_experts} experts are even; "
            f"give at least that"
        )
    if not g <= most * (1 + 1e-9):
        raise ConfigError(_too_uneven(g, top_k, places))
    return places


def _too_uneven(g: float, top_k: int, places: int) -> str:
    if places == 1:
        return f"G={g} is above 1, where one expert has every token; give at most 1"
    return (
        f"G={g} is above 1/{top_k} = {1 / top_k:.4g}: with top_k={top_k} tokens would have to go "
        "to one expert twice; give at most that, or repeat=True, which lets them"
    )


def _capped_zipf(n_experts: int, s: float, places: int) -> list[float]:
    cap = 1 / places
    for full in range(places):
        # relative to the first that is not full, so that no exponent makes all of them vanish
        weights = [(rank / (full + 1)) ** -s for rank in range(full + 1, n_experts + 1)]
        scale = (1 - full * cap) / sum(weights)
        if scale <= cap:
            break
    return [cap] * full + [min(cap, weight * scale) for weight in weights]


# -- drawn --------------------------------------------------------------------------------


class Drawn:
    """Draws each token's experts with given shares of the assignments, [L, E].

    A token's experts are distinct, and it has expert e with the probability top_k * p_e: K points
    one place apart, thrown at the shares laid end to end, hit no expert twice, none being wider
    than a place. With `repeat` the places are drawn one by one. Every call draws anew; the same
    calls after the same seed draw the same.
    """

    def __init__(
        self, shares_LE: Sequence[Sequence[float]], top_k: int, seed: int = 0, repeat: bool = False
    ) -> None:
        if not shares_LE or len({len(shares) for shares in shares_LE}) != 1:
            raise ConfigError("shares must be given for at least one layer, as many in each")
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

    def _widths(self, layer: int, shares: Sequence[float]) -> list[int]:
        """The shares in units, exactly top_k places in all."""
        whole = math.fsum(shares)
        if not (math.isfinite(whole) and whole > 0 and min(shares) >= 0):
            raise ConfigError(f"the shares of layer {layer} must be at least 0, and some above it")
        total = self.top_k * _UNIT
        widest = total if self.repeat else _UNIT
        largest = max(shares) / whole
        if largest * self.top_k > 1 + 1e-9 and not self.repeat:
            raise ConfigError(
                f"an expert of layer {layer} has {largest:.4g} of the assignments; with "
                f"top_k={self.top_k} and no expert twice it can have {1 / self.top_k:.4g} at most; "
                "give another top_k, or repeat=True"
            )
        widths = [min(widest, int(share / whole * total)) for share in shares]
        left = total - sum(widths)  # what rounding down left over goes to the popular ones
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
        return [width / (self.top_k * _UNIT) for width in widths]

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> Tensor:
        ends_LE, generator = self._on(device)
        total = self.top_k * _UNIT
        shape = (n_tokens, self.top_k if self.repeat else 1)
        points = torch.randint(total, shape, generator=generator, device=device)
        if not self.repeat:
            places = torch.arange(0, total, _UNIT, device=device)
            points = (points + places) % total
        return torch.searchsorted(ends_LE[layer], points, right=True)

    def _on(self, device: torch.device) -> tuple[Tensor, torch.Generator]:
        if device not in self._on_device:
            generator = torch.Generator(device).manual_seed(self._seed)
            self._on_device[device] = (self._ends_LE.to(device), generator)
        return self._on_device[device]


class Simulated(Drawn):
    """Routing with a wanted imbalance G. Which experts are the popular ones differs by layer. With
    `zipf` the shares fall by rank instead of being a few hot ones over a floor."""

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        top_k: int,
        g: float,
        seed: int = 0,
        repeat: bool = False,
        zipf: bool = False,
    ) -> None:
        if n_layers < 1:
            raise ConfigError(f"n_layers={n_layers} must be at least 1")
        shares = (zipf_shares if zipf else hot_shares)(n_experts, g, top_k, repeat)
        generator = torch.Generator().manual_seed(seed)
        ranks = [torch.randperm(n_experts, generator=generator).tolist() for _ in range(n_layers)]
        super().__init__([[shares[rank] for rank in layer] for layer in ranks], top_k, seed, repeat)


# -- recorded -----------------------------------------------------------------------------


class Replayed:
    """The routing of a real model, token after token, and from the start again at the end.

    Each layer has its own position: the n-th token of every layer is the same token of the trace.
    """

    def __init__(
        self,
        experts_TLK: Tensor,
        n_experts: int | None = None,
        offsets: Sequence[int] | None = None,
    ) -> None:
        """`offsets`: where each sequence starts, and the end of the last."""
        if experts_TLK.dim() != 3 or experts_TLK.numel() == 0:
            raise ConfigError(
                f"a trace is [tokens, layers, top_k], not of shape {list(experts_TLK.shape)}"
            )
        n_tokens, self.n_layers, self.top_k = experts_TLK.shape
        highest = int(experts_TLK.max())
        self.n_experts = highest + 1 if n_experts is None else n_experts
        if highest >= self.n_experts or int(experts_TLK.min()) < 0:
            raise ConfigError(
                f"the trace names expert {highest}, of n_experts={self.n_experts}; give at least "
                f"{highest + 1}"
            )
        self.offsets = [0, n_tokens] if offsets is None else list(offsets)
        rising = all(a <= b for a, b in zip(self.offsets, self.offsets[1:], strict=False))
        if not rising or self.offsets[:1] != [0] or self.offsets[-1:] != [n_tokens]:
            raise ConfigError(f"offsets must rise from 0 to {n_tokens}, the tokens of the trace")
        self._trace_LTK = experts_TLK.transpose(0, 1).contiguous()
        self._on_device: dict[torch.device, Tensor] = {}
        self._next = [0] * self.n_layers

    @classmethod
    def from_npz(cls, path: Path | str, n_experts: int | None = None) -> "Replayed":
        """A file with `experts` [tokens, layers, top_k] and the `offsets` of its sequences."""
        try:
            with np.load(path, allow_pickle=False) as file:
                experts, offsets = file["experts"], file["offsets"]
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{path} is not a recorded routing ({error}); give an .npz with `experts` "
                "[tokens, layers, top_k] and `offsets`"
            ) from error
        if experts.dtype.kind not in "ui":
            raise ConfigError(f"`experts` in {path} is {experts.dtype}; it must be whole numbers")
        # a byte holds most ids, and a trace lies on the device as a whole
        ids = torch.from_numpy(experts.astype(np.uint8 if experts.max(initial=0) < 256 else "i8"))
        return cls(ids, n_experts, offsets.tolist())

    @staticmethod
    def from_counts(
        path: Path | str,
        top_k: int | None = None,
        model: str | None = None,
        domain: str | None = None,
        seed: int = 0,
    ) -> Drawn:
        """A JSON file that holds counts only: tokens are drawn with the recorded shares."""
        counts_LE, recorded = _read_counts(Path(path), model, domain)
        top_k = recorded if top_k is None else top_k
        if top_k is None:
            raise ConfigError(f"{path} does not say how many experts a token has; give top_k")
        return Drawn(counts_LE, top_k, seed)

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> Tensor:
        if device not in self._on_device:
            self._on_device[device] = self._trace_LTK.to(device)
        trace_TK = self._on_device[device][layer]
        start, length = self._next[layer], trace_TK.shape[0]
        self._next[layer] = (start + n_tokens) % length
        rows = torch.arange(start, start + n_tokens, device=device) % length
        return trace_TK.index_select(0, rows).long()

    def sequence(self, index: int) -> Tensor:
        """The trace of one sequence, [T, L, K] int64; `Replayed` takes it too."""
        start, end = self.offsets[:-1][index], self.offsets[1:][index]
        return self._trace_LTK[:, start:end].transpose(0, 1).long()


def _read_counts(
    path: Path, model: str | None, domain: str | None
) -> tuple[list[list[float]], int | None]:
    """([L, E], top_k if the file says it): either `popularity`, or of one of several models
    `expert_counts` by domain and layer."""
    try:
        file = json.loads(path.read_text())
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
        there = ", ".join(options) if isinstance(options, dict) else "none"
        raise ConfigError(f"{path} has no {what} {name}; give one of: {there}")
    return options[name]


# -- into a model -------------------------------------------------------------------------


class _Experts(Protocol):
    """Of an engine, what a source must fit."""

    n_layers: int
    n_experts: int


class _Placeholder(Protocol):
    """Stands for a layer's experts in a model; it asks `source`, if it has one, for the routing."""

    engine: _Experts
    source: RoutingSource | None


@contextmanager
def routed_by(model: nn.Module, source: RoutingSource) -> Iterator[None]:
    """Within it, the tokens of an offloaded model go where `source` says; the routing weights stay
    the gates' own."""
    placeholders = _placeholders(model, source)
    before = [placeholder.source for placeholder in placeholders]
    try:
        for placeholder in placeholders:
            placeholder.source = source
        yield
    finally:
        for placeholder, own in zip(placeholders, before, strict=True):
            placeholder.source = own


def rerouted(source: RoutingSource, layer: int, expert_ids_TK: Tensor) -> Tensor:
    """What `source` says instead of the gate's ids."""
    n_tokens, top_k = expert_ids_TK.shape
    if top_k != source.top_k:
        raise _misfit("experts a token", source.top_k, top_k)
    return source(layer, n_tokens, expert_ids_TK.device)


def _placeholders(model: nn.Module, source: RoutingSource) -> list[_Placeholder]:
    found = []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not getattr(parameter, "is_expert_placeholder", False):
                continue
            placeholder = cast(_Placeholder, parameter)
            _check_fits(source, placeholder.engine, getattr(module, "router", None))
            found.append(placeholder)
    if not found:
        raise ConfigError(
            "the model has no offloaded experts whose routing could be replaced; call "
            "overspill.offload(model) first"
        )
    return found


def _check_fits(source: RoutingSource, engine: _Experts, router: object) -> None:
    if source.n_layers < engine.n_layers:
        raise _misfit("MoE layers", source.n_layers, engine.n_layers)
    if source.n_experts != engine.n_experts:
        raise _misfit("experts a layer", source.n_experts, engine.n_experts)
    # models of others say how many experts a token has when they route, see `rerouted`
    if isinstance(router, Router) and source.top_k != router.top_k:
        raise _misfit("experts a token", source.top_k, router.top_k)


def _misfit(what: str, has: int, wants: int) -> ConfigError:
    return ConfigError(
        f"the routing source has {has} {what}, the model {wants}; give one made for the model"
    )
