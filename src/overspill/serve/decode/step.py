"""One decoding step of the common decoder structure: a token of each sequence of a batch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute.decode.attention import attend, rotate_and_store
from overspill.compute.decode.experts import experts
from overspill.compute.decode.host import HostRows
from overspill.compute.decode.linear import linear
from overspill.compute.decode.norm import add_norm
from overspill.compute.decode.routing import route
from overspill.serve.decode.host_experts import HostExperts
from overspill.serve.decode.structure import Attention, Decoder, Experts, Norm
from overspill.serve.decode.table import ExpertTable
from overspill.serve.sampling import Chosen

KeysValues = tuple[Tensor, Tensor]


class Batch(NamedTuple):
    """One token of each of B sequences, as memory of the device."""

    tokens: Tensor  # [B]
    positions: Tensor  # [B]
    real: Tensor  # [B], 0 for a row that only fills the batch up
    blocks: Tensor  # [B, n], of keys and values
    ids: Tensor | None = None  # [L, B, K]: experts that are used instead of the routers'


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


class DecodeStep:
    """Computes logits with few, fused kernels. Reads nothing back to the host."""

    def __init__(
        self,
        decoder: Decoder,
        table: ExpertTable,
        cache: Sequence[KeysValues],
        block_size: int,
        host: HostExperts | None = None,
    ) -> None:
        """`cache` has the keys and values of each layer; `host` computes experts that are not on
        the device."""
        self._decoder = decoder
        self._table = table
        self._cache = cache
        self._block_size = block_size
        self._host = host

    def __call__(self, batch: Batch) -> Computed:
        """The logits after these tokens, the last of their sequences."""
        decoder = self._decoder
        residual = F.embedding(batch.tokens, decoder.embedding)
        fed, ids = Fed([]), batch.ids
        if ids is None:
            ids = self._new_ids(len(residual))
        for number, layer in enumerate(decoder.layers):
            x = _add_norm(residual, fed, layer.attention_norm)
            y = self._attend(number, layer.attention, x, batch)
            x = _add_norm(residual, Fed([y]), layer.feed_norm)
            feed = layer.feed
            if isinstance(feed, Experts):
                fed = self._experts(feed, x, batch, ids[feed.placeholder.layer])
            else:
                fed = Fed([feed(x)])
        x = _add_norm(residual, fed, decoder.norm)
        return Computed(_linear(x, decoder.head, decoder.head_bias), ids)

    def _new_ids(self, n_rows: int) -> Tensor:
        layers = self._decoder.experts
        shape = len(layers), n_rows, layers[0].top_k
        return torch.empty(shape, dtype=torch.int32, device=self._table.offsets.device)

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
        tables = self._decoder.cosines, self._decoder.sines
        where = batch.positions, batch.blocks, self._block_size
        q = rotate_and_store(qkv, tables, norms, eps, *where, cache)
        y = attend(q, cache, *where, own.scale, own.window, own.sinks)
        return _linear(y, own.out, own.out_bias)

    def _experts(self, own: Experts, x: Tensor, batch: Batch, ids_BK: Tensor) -> Fed:
        wide = torch.float32 if own.wide_router else x.dtype
        logits = linear(x, own.router, own.router_bias, wide)
        host, layer = self._host, own.placeholder.layer
        choice = own.top_k, own.softmax_first, own.normalize, self._table.offsets[layer]
        buffers = None if host is None else host.buffers
        given = batch.ids is not None
        routed = route(logits, *choice, batch.real, x, ids_BK, buffers, given)
        request = None
        if host is not None and routed.missed_B is not None:
            request = host.request(layer, routed.missed_B)
        shape = own.placeholder.engine.shape
        y = experts(
            x, routed.weights, routed.offsets, self._table.base, shape.d_hidden, own.activation,
            shape.bias, shape.transposed, request,
        )  # fmt: skip
        parts = [y] if own.shared is None else [y, own.shared(x)]
        if host is None or routed.missed_B is None:
            return Fed(parts)
        return Fed(parts, host.rows(layer, routed.missed_B))


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
