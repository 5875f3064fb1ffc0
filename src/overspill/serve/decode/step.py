"""One decoding step of the common decoder structure: a token of each sequence of a batch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute.decode.attention import attend, rotate_and_store
from overspill.compute.decode.experts import experts
from overspill.compute.decode.host import HostRows
from overspill.compute.decode.linear import linear
from overspill.compute.decode.norm import add_norm
from overspill.compute.decode.routing import Routed, look_up, route
from overspill.compute.misses import MissBuffers
from overspill.moe.predictor import Predictor
from overspill.serve.decode.missing import MissingExperts
from overspill.serve.decode.modes import Auto, Mode
from overspill.serve.decode.structure import Attention, Decoder, Experts, Norm
from overspill.serve.decode.table import ExpertTable
from overspill.serve.sampling import Chosen

KeysValues = tuple[Tensor, Tensor]


class Sources(NamedTuple):
    """The source of each of B sequences of an encoder-decoder."""

    last: Tensor  # [B], the position of its last token
    blocks: Tensor  # [B, n], of its keys and values


class Batch(NamedTuple):
    """One token of each of B sequences, as memory of the device."""

    tokens: Tensor  # [B]
    positions: Tensor  # [B]
    real: Tensor  # [B], 0 for a row that only fills the batch up
    blocks: Tensor  # [B, n], of keys and values
    ids: Tensor | None = None  # [L, B, K]: experts that are used instead of the routers'
    sources: Sources | None = None
    states: Tensor | None = None  # [B], slots of what sequences have beside keys and values


class Fed(NamedTuple):
    """What a feed-forward adds to the residual."""

    parts: list[Tensor]
    host: HostRows | None = None


class Computed(NamedTuple):
    """What a step gives."""

    logits_BV: Tensor
    ids_LBK: Tensor
    """The experts of each token."""
    chosen: Chosen | None = None
    """The tokens that were drawn."""
    inputs_LBD: Sequence[Tensor] = ()
    """The inputs of the gates, if they are learned from."""


class DecodeStep:
    """Computes logits with few, fused kernels. Reads nothing back to the host."""

    def __init__(
        self,
        decoder: Decoder,
        table: ExpertTable,
        cache: Sequence[KeysValues],
        block_size: int,
        missing: MissingExperts | None = None,
        mode: Mode | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        """`cache` has the keys and values of each layer; `missing` gives experts that are not on
        the device, as `mode` wants it. Where a mode wants to know experts of later layers,
        `predictor` names them, or copies of their gates."""
        self.decoder = decoder
        self.table = table
        self._cache = cache
        self._block_size = block_size
        self._missing = missing
        self._mode = mode or Auto(on_cpu=True)
        self._learns = predictor is not None
        self.guesses = decoder.experts if predictor is None else _guesses(decoder, predictor)
        """Of each layer, what names its experts for the input of the layer before."""

    def __call__(self, batch: Batch) -> Computed:
        """The logits after these tokens, the last of their sequences."""
        decoder = self.decoder
        residual = F.embedding(batch.tokens, decoder.embedding)
        fed, ids = Fed([]), batch.ids
        if ids is None:
            ids = self._new_ids(len(residual))
        routing = _Routing(self, batch, ids)
        for number, layer in enumerate(decoder.layers):
            x = _add_norm(residual, fed, layer.attention_norm)
            y = self._attend(number, layer.attention, x, batch)
            x = _add_norm(residual, Fed([y]), layer.feed_norm)
            feed = layer.feed
            fed = self._feed(feed, x, routing) if isinstance(feed, Experts) else Fed([feed(x)])
        x = _add_norm(residual, fed, decoder.norm)
        logits = _linear(x, decoder.head, decoder.head_bias)
        # their memory is not used for anything else as long as they are referred to
        return Computed(logits, ids, inputs_LBD=routing.inputs_LBD if self._learns else ())

    def _new_ids(self, n_rows: int) -> Tensor:
        layers = self.decoder.experts
        shape = len(layers), n_rows, layers[0].top_k
        return torch.empty(shape, dtype=torch.int32, device=self.table.offsets.device)

    def _attend(self, layer: int, own: Attention, x: Tensor, batch: Batch) -> Tensor:
        qkv = _linear(x, own.qkv, own.qkv_bias)
        if own.row_norms is not None:
            qkv = _norm_rows(qkv, own, own.row_norms)
        if own.clip is not None:
            qkv = qkv.clamp(-own.clip, own.clip)
        norms, eps = None, 0.0
        if own.head_norms is not None:
            norms = own.head_norms[0].weight, own.head_norms[1].weight
            eps = own.head_norms[0].eps
        cache = self._cache[layer]
        tables = self.decoder.cosines, self.decoder.sines
        where = batch.positions, batch.blocks, self._block_size
        q = rotate_and_store(qkv, tables, norms, eps, *where, cache)
        y = attend(q, cache, *where, own.scale, own.window, own.sinks)
        return _linear(y, own.out, own.out_bias)

    def route(
        self, own: Experts, x: Tensor, batch: Batch, ids_BK: Tensor, misses: MissBuffers | None,
        given: bool,
    ) -> Routed:  # fmt: skip
        wide = torch.float32 if own.wide_router else x.dtype
        logits = linear(x, own.router, own.router_bias, wide)
        choice = own.top_k, own.softmax_first, own.normalize
        table = self.table.offsets[own.placeholder.layer]
        return route(logits, *choice, table, batch.real, x, ids_BK, misses, given)

    def _feed(self, own: Experts, x: Tensor, routing: "_Routing") -> Fed:
        layer, missing = own.placeholder.layer, self._missing
        routed = routing.enter(layer, x, missing, self._mode)
        shape = own.placeholder.engine.shape
        request = None if missing is None else missing.request(layer, routed.missed_B)
        y = experts(
            x, routed.weights, routed.offsets, self.table.base, shape.d_hidden, own.activation,
            shape.bias, shape.transposed, request, self.table.packed(layer, own.activation),
            self.table.low_rank,
        )  # fmt: skip
        parts = [y] if own.shared is None else [y, own.shared(x)]
        return Fed(parts, None if missing is None else missing.rows(layer, routed.missed_B))


class _Routing:
    """The experts of the tokens of one step: those of the current layer, and of later ones as far
    as pre-gates have chosen them."""

    def __init__(self, step: DecodeStep, batch: Batch, ids_LBK: Tensor) -> None:
        self._step = step
        self._batch = batch
        self._ids_LBK = ids_LBK
        self._given = batch.ids is not None
        self.level = step.decoder.level
        self.n_layers = len(ids_LBK)
        self._weights: dict[int, Tensor] = {}  # of layers whose experts are chosen already
        self._x: Tensor | None = None  # of the current layer
        self._asks = False  # whether it is of use to know experts of a later one
        self.inputs_LBD: list[Tensor] = []  # of all layers so far

    def enter(self, layer: int, x: Tensor, missing: MissingExperts | None, mode: Mode) -> Routed:
        """The experts of a layer with this input, and where they are."""
        self._x = x
        self.inputs_LBD.append(x)
        link = None if missing is None else missing.link(layer, len(x))
        simple = link is None and not self.level
        buffers = None if missing is None else missing.buffers
        routed = None
        if layer not in self._weights:
            routed = self._choose(layer, buffers if simple else None)
        later = layer + self.level
        if self.level and later < self.n_layers:
            self._weights[later] = self._choose(later, None).weights
        self._asks = missing is not None and missing.follows(len(x))
        if missing is not None:
            ahead = mode.ahead(layer, self)
            if ahead is not None:
                missing.begin(ahead, self._batch.real)
        if routed is not None and simple:
            return routed
        weights = self._weights.pop(layer) if routed is None else routed.weights
        staged = None if missing is None else missing.staged(layer)
        table, ids = self._step.table.offsets[layer], self._ids_LBK[layer]
        return look_up(ids, weights, table, self._batch.real, x, buffers, link, staged)

    def known(self, layer: int) -> Tensor | None:
        return self._ids_LBK[layer]

    def guess(self, layer: int) -> Tensor | None:
        if not self._asks:
            return None
        if self._given:  # the routers do not choose
            return self._ids_LBK[layer]
        assert self._x is not None
        ids = torch.empty_like(self._ids_LBK[layer])
        own = self._step.guesses[layer]
        self._step.route(own, self._x, self._batch, ids, None, given=False)
        return ids

    def _choose(self, layer: int, misses: MissBuffers | None) -> Routed:
        assert self._x is not None
        own, ids = self._step.decoder.experts[layer], self._ids_LBK[layer]
        return self._step.route(own, self._x, self._batch, ids, misses, self._given)


def _guesses(decoder: Decoder, predictor: Predictor) -> list[Experts]:
    """The gates of the layers, those after the first one with the weights of a predictor."""
    weights, biases = predictor.weights[1], predictor.biases[1]
    return [
        own
        if not layer
        else replace(
            own, router=weights[layer - 1], router_bias=biases[layer - 1], wide_router=True
        )
        for layer, own in enumerate(decoder.experts)
    ]


def _add_norm(residual: Tensor, fed: Fed, norm: Norm) -> Tensor:
    return add_norm(residual, fed.parts, norm.weight, norm.eps, fed.host)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias) if len(x) == 1 else F.linear(x, weight, bias)


def _norm_rows(qkv: Tensor, own: Attention, norms: tuple[Norm, Norm]) -> Tensor:
    widths = [own.heads * own.width, own.kv_heads * own.width, own.kv_heads * own.width]
    q, k, v = qkv.split(widths, dim=1)
    q, k = (
        _add_norm(each.contiguous(), Fed([]), norm)
        for each, norm in zip((q, k), norms, strict=True)
    )
    return torch.cat((q, k, v), dim=1)
