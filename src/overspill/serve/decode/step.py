"""One decoding step of the common decoder structure: a token of each sequence of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute.activation import activate_torch
from overspill.compute.activation_form import Form, Function
from overspill.compute.decode.attention import attend, rotate_and_store
from overspill.compute.decode.cpu import CpuRows
from overspill.compute.decode.delta import convolve, delta_rule
from overspill.compute.decode.linear import RowNorm, gate_rows, linear, reads_rows_whole
from overspill.compute.decode.norm import add_norm
from overspill.compute.decode.routing import Routed, route
from overspill.compute.misses import MissBuffers
from overspill.models.huggingface.recurrent import RecurrentStates
from overspill.moe.predictor import Predictor
from overspill.serve.decode.step_experts import StepExperts
from overspill.serve.decode.structure import (
    Attention,
    Decoder,
    Dense,
    Experts,
    Layer,
    LinearAttention,
    Norm,
)
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
    states: Tensor  # [B], slots of states, in models that have states
    ids: Tensor | None = None  # [L, B, K]: experts that are used instead of the routers'
    sources: Sources | None = None


class Addends(NamedTuple):
    """Results of a sublayer that are not added to the residual yet."""

    parts: list[Tensor]
    host: CpuRows | None = None
    """Rows that the CPU computes."""


class Computed(NamedTuple):
    """Results of a step."""

    logits_BV: Tensor
    ids_LBK: Tensor
    """Ids of the experts of each token."""
    chosen: Chosen | None = None
    """The tokens that the device has drawn."""
    inputs_LBD: Sequence[Tensor] = ()
    """The inputs of the gates, if a predictor learns from them."""


class DecodeStep:
    """Computes logits with few, fused kernels. Reads nothing back to the host."""

    def __init__(
        self,
        decoder: Decoder,
        experts: StepExperts,
        cache: Mapping[int, KeysValues],
        block_size: int,
        predictor: Predictor | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        """`cache` has the keys and values of each layer, `states` the states of layers with linear
        attention. Where a mode wants to know experts of later layers, `predictor` names them, or
        without one copies of their gates."""
        self.decoder = decoder
        self.experts = experts
        self._cache = cache
        self._states = states
        self._block_size = block_size
        self._learns = predictor is not None
        self.guesses = decoder.experts if predictor is None else _guesses(decoder, predictor)
        """Gates of each layer that are applied to the input of the layer before."""

    def __call__(self, batch: Batch) -> Computed:
        """Return the logits after these tokens, the last ones of their sequences."""
        decoder = self.decoder
        residual = self._embed(batch)
        addends, ids = Addends([]), batch.ids
        if ids is None:
            ids = self._new_ids(len(residual))
        routing = _Routing(self, batch, ids)
        bias = None if decoder.bias is None else decoder.bias.by_distance()
        for number, layer in enumerate(decoder.layers):
            hidden = _Hidden(residual, addends, layer.attention_norm)
            own = layer.attention
            if isinstance(own, LinearAttention):
                addends = self._change_states(own, hidden, batch)
            else:
                addends = self._attend(number, own, hidden, batch, bias)
            if layer.source is not None:
                norm, source = layer.source
                hidden = _Hidden(residual, addends, norm)
                addends = self._attend_to_source(number, source, hidden, batch)
            addends = self._feed(layer, _Hidden(residual, addends, layer.feed_norm), routing)
        x = _Hidden(residual, addends, decoder.norm).normed()
        logits = _linear(x, decoder.head, decoder.head_bias)
        # their memory is not used for anything else as long as they are referred to
        return Computed(logits, ids, inputs_LBD=routing.inputs_LBD if self._learns else ())

    def _embed(self, batch: Batch) -> Tensor:
        decoder, positions = self.decoder, self.decoder.positions
        x = F.embedding(batch.tokens, decoder.embedding)
        if decoder.embedding_scale != 1:
            x = x * decoder.embedding_scale
        if positions is None:
            return x
        padding = positions.padding
        place = torch.where(batch.tokens == padding, padding, batch.positions + padding + 1)
        return x + positions.table[place]

    def _new_ids(self, n_rows: int) -> Tensor:
        layers = self.decoder.experts
        shape = len(layers), n_rows, layers[0].top_k if layers else 0
        return torch.empty(shape, dtype=torch.int32, device=self.experts.table.offsets.device)

    def _attend(
        self, layer: int, own: Attention, x: "_Hidden", batch: Batch, bias_hn: Tensor | None
    ) -> Addends:
        qkv = x.linear(own.qkv, own.qkv_bias)
        if own.row_norms is not None:
            qkv = _norm_rows(qkv, own, own.row_norms)
        if own.clip is not None:
            qkv = qkv.clamp(-own.clip, own.clip)
        norms, eps, shift = None, 0.0, 0.0
        if own.head_norms is not None:
            norms = own.head_norms[0].weight, own.head_norms[1].weight
            eps, shift = own.head_norms[0].eps, own.head_norms[0].shift
        cache, tables = self._cache[layer], self.decoder.rotary
        where = batch.positions, batch.blocks, self._block_size
        q, gates = qkv, qkv if own.gated else None
        if tables is not None:
            q = rotate_and_store(qkv, tables, norms, eps, *where, cache, shift, own.gated)
        limits = own.scale, own.window, own.sinks
        y = attend(q, cache, *where, *limits, bias_hn=bias_hn, gated_row=gates)
        return _add_linear(x.residual, y, own.out, own.out_bias)

    def _attend_to_source(self, layer: int, own: Attention, x: "_Hidden", batch: Batch) -> Addends:
        assert batch.sources is not None
        q = x.linear(own.qkv, own.qkv_bias).view(-1, own.heads, own.width)
        where = batch.sources.last, batch.sources.blocks, self._block_size
        y = attend(q, self._cache[layer], *where, own.scale)
        return _add_linear(x.residual, y, own.out, own.out_bias)

    def _change_states(self, own: LinearAttention, x: "_Hidden", batch: Batch) -> Addends:
        assert self._states is not None
        inputs, states = self._states.of(own.module)
        row = x.linear(own.projections, None)
        qkv = convolve(row, own.convolution, inputs, batch.states, own.shape)
        norm = own.norm.weight, own.norm.eps
        y = delta_rule(qkv, row, states, batch.states, own.rates, norm, own.shape)
        return _add_linear(x.residual, y, own.out, None)

    def route(
        self, own: Experts, x: Tensor, batch: Batch, ids_BK: Tensor, misses: MissBuffers | None,
        given: bool, logits: Tensor | None = None,
    ) -> Routed:  # fmt: skip
        """Choose the experts of a layer for the input `x`, and write their ids to `ids_BK`; with
        `given` they are there already. `logits` are those of the router, if they are known."""
        if logits is None:
            wide = torch.float32 if own.wide_router else x.dtype
            logits = linear(x, own.router, own.router_bias, wide)
        choice = own.top_k, own.softmax_first, own.normalize
        if own.ids is not None and not given:
            ids_BK.copy_(own.ids.expand_as(ids_BK))
            given = True
        table = self.experts.table.offsets[own.placeholder.layer]
        return route(logits, *choice, table, batch.real, x, ids_BK, misses, given, own.scale)

    def _feed(self, of: Layer, x: "_Hidden", routing: "_Routing") -> Addends:
        feed = of.feed
        if isinstance(feed, Experts):
            return self._feed_experts(feed, x.normed(), routing)
        if not isinstance(feed, Dense):
            return Addends([feed(x.normed())])
        hidden = x.linear(feed.w_in, feed.b_in, feed.function)
        return _add_linear(x.residual, hidden, feed.w_out, feed.b_out)

    def _feed_experts(self, own: Experts, x: Tensor, routing: "_Routing") -> Addends:
        shared, logits, hidden = own.shared, None, None
        if shared is not None and shared.joined is not None:
            both = _linear(x, shared.joined, None)
            logits, hidden = both[:, : len(own.router)], both[:, len(own.router) :]
        routed = routing.enter(own.placeholder.layer, x, logits)
        y, rows = self.experts.compute(own.placeholder, own.activation, x, routed)
        parts = [y]
        if shared is not None and hidden is not None:
            parts.append(_gated_linear(hidden, shared.out, own.activation.function))
        elif shared is not None:
            parts.append(shared.module(x))
        return Addends(parts, rows)


class _Hidden(NamedTuple):
    """Hidden states before a norm: the residual, and results that the norm adds to it first."""

    residual: Tensor
    addends: Addends
    norm: Norm

    def normed(self) -> Tensor:
        """Return the normed sum; the residual becomes the sum."""
        norm, addends = self.norm, self.addends
        how = norm.bias, norm.scale, norm.shift
        return add_norm(self.residual, addends.parts, norm.weight, norm.eps, addends.host, *how)

    def linear(
        self, weight: Tensor, bias: Tensor | None, function: Function | None = None
    ) -> Tensor:
        norm = self.norm
        if len(self.residual) > 1:
            y = F.linear(self.normed(), weight, bias)
            return y if function is None else activate_torch(y, Form(function, False))
        plain = norm.scale == 1 and norm.shift == 0
        if self.addends.parts or not plain or not reads_rows_whole(weight):
            return linear(self.normed(), weight, bias, function=function)
        own = RowNorm(norm.weight, norm.bias, norm.eps)
        return linear(self.residual, weight, bias, function=function, norm=own)


class _Routing:
    """Experts of the tokens of one step: of the current layer, and of later layers as far as
    pre-gates have chosen them. Layers have their numbers in the model, from the first layer of
    experts in the decoder on."""

    def __init__(self, step: DecodeStep, batch: Batch, ids_LBK: Tensor) -> None:
        self._step = step
        self._batch = batch
        self._ids_LBK = ids_LBK
        self._given = batch.ids is not None
        self.level = step.decoder.level
        self._first = step.decoder.first
        self.n_layers = self._first + len(ids_LBK)
        self._weights: dict[int, Tensor] = {}  # of layers whose experts are chosen already
        self.inputs_LBD: list[Tensor] = []
        """Inputs of the gates of all layers so far, the current one last."""

    def enter(self, layer: int, x: Tensor, logits: Tensor | None) -> Routed:
        """Choose and find the experts of a layer with the input `x`. `logits` are those of its
        router, if they are known."""
        self.inputs_LBD.append(x)
        experts, real_B = self._step.experts, self._batch.real
        # the kernel that chooses experts finds them too
        at_once = not (self.level or experts.needs_look_up(len(x)))
        routed = None
        if layer not in self._weights:
            routed = self._choose(layer, experts.buffers if at_once else None, logits)
        later = layer + self.level
        if self.level and later < self.n_layers:
            self._weights[later] = self._choose(later, None).weights
        experts.begin_ahead(layer, self, real_B)
        if routed is not None and at_once:
            return routed
        weights = self._weights.pop(layer) if routed is None else routed.weights
        return experts.look_up(layer, self._ids_LBK[layer - self._first], weights, real_B, x)

    def known(self, layer: int) -> Tensor | None:
        """Return the ids of experts that a pre-gate has chosen already."""
        number = layer - self._first
        return self._ids_LBK[number] if self._given or number >= self.level else None

    def guess(self, layer: int) -> Tensor | None:
        """Return the ids that the gate of a later layer chooses for the input of this one."""
        x, number = self.inputs_LBD[-1], layer - self._first
        if not self._step.experts.follows(len(x)):
            return None
        if self._given:  # the routers do not choose
            return self._ids_LBK[number]
        ids = torch.empty_like(self._ids_LBK[number])
        own = self._step.guesses[number]
        self._step.route(own, x, self._batch, ids, None, given=False)
        return ids

    def _choose(
        self, layer: int, misses: MissBuffers | None, logits: Tensor | None = None
    ) -> Routed:
        x, number = self.inputs_LBD[-1], layer - self._first
        own, ids = self._step.decoder.experts[number], self._ids_LBK[number]
        return self._step.route(own, x, self._batch, ids, misses, self._given, logits)


def _guesses(decoder: Decoder, predictor: Predictor) -> list[Experts]:
    """Return the gates of the layers; all but the first have the weights of a predictor."""
    weights, biases = predictor.weights[1], predictor.biases[1]
    return [
        own
        if not number
        else replace(own, router=weights[at], router_bias=biases[at], wide_router=True, ids=None)
        for number, own in enumerate(decoder.experts)
        for at in (own.placeholder.layer - 1,)
    ]


def _add_linear(residual: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Addends:
    """Add a product to the residual, or return it for the norm that follows."""
    if len(y) > 1:
        return Addends([F.linear(y, weight, bias)])
    linear(y, weight, bias, into_BN=residual)
    return Addends([])


def _gated_linear(x: Tensor, weight: Tensor, function: Function) -> Tensor:
    if len(x) == 1:
        return linear(x, weight, gate=function)
    return F.linear(gate_rows(x, weight.shape[1], function), weight)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias) if len(x) == 1 else F.linear(x, weight, bias)


def _norm_rows(qkv: Tensor, own: Attention, norms: tuple[Norm, Norm]) -> Tensor:
    widths = [own.heads * own.width, own.kv_heads * own.width, own.kv_heads * own.width]
    q, k, v = qkv.split(widths, dim=1)
    q, k = (
        _Hidden(each.contiguous(), Addends([]), norm).normed()
        for each, norm in zip((q, k), norms, strict=True)
    )
    return torch.cat((q, k, v), dim=1)
