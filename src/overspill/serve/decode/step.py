"""One decoding step of the common decoder structure: a token of each sequence of a batch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute.decode.attention import attend, rotate_and_store
from overspill.compute.decode.constants import ABSENT
from overspill.compute.decode.experts import experts
from overspill.compute.decode.host import HostRows
from overspill.compute.decode.linear import linear
from overspill.compute.decode.norm import add_norm
from overspill.compute.decode.routing import Routed, look_up, route
from overspill.compute.misses import MissBuffers
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
        following = [*decoder.experts[1:], None]
        for number, layer in enumerate(decoder.layers):
            x = _add_norm(residual, fed, layer.attention_norm)
            y = self._attend(number, layer.attention, x, batch)
            x = _add_norm(residual, Fed([y]), layer.feed_norm)
            feed = layer.feed
            if isinstance(feed, Experts):
                at = feed.placeholder.layer
                self._expect(following[at], x, batch)
                fed = self._experts(feed, x, batch, ids[at])
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

    def _expect(self, following: Experts | None, x: Tensor, batch: Batch) -> None:
        """Tells the host which experts the next layer will miss, as its router sees this layer's
        input: most of them are right."""
        host = self._host
        if host is None or not host.reads_ahead or following is None or batch.ids is not None:
            return
        ids = torch.empty(len(x), following.top_k, dtype=torch.int32, device=x.device)
        offsets = self._route(following, x, batch, ids, None, given=False).offsets
        absent = (offsets == ABSENT) & (batch.real != 0)[:, None]
        host.buffers.ahead_P[: ids.numel()].view_as(ids).copy_(torch.where(absent, ids, -1))

    def _route(
        self, own: Experts, x: Tensor, batch: Batch, ids_BK: Tensor, misses: MissBuffers | None,
        given: bool,
    ) -> Routed:  # fmt: skip
        wide = torch.float32 if own.wide_router else x.dtype
        logits = linear(x, own.router, own.router_bias, wide)
        choice = own.top_k, own.softmax_first, own.normalize
        table = self._table.offsets[own.placeholder.layer]
        return route(logits, *choice, table, batch.real, x, ids_BK, misses, given)

    def _experts(self, own: Experts, x: Tensor, batch: Batch, ids_BK: Tensor) -> Fed:
        host, layer = self._host, own.placeholder.layer
        buffers = None if host is None else host.buffers
        link = None if host is None else host.link(self._table, layer, len(x))
        misses = buffers if link is None else None
        routed = self._route(own, x, batch, ids_BK, misses, batch.ids is not None)
        if link is not None:
            table = self._table.offsets[layer]
            routed = look_up(ids_BK, routed.weights, table, batch.real, x, buffers, link)
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
