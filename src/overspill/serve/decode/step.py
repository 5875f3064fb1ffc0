"""One decoding step of the common decoder structure: a token of each sequence of a batch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute import decode_triton as kernels
from overspill.moe.engine import Engine
from overspill.serve.decode.host_experts import HostExperts
from overspill.serve.decode.structure import Attention, Decoder, Experts, Norm

KeysValues = tuple[Tensor, Tensor]


class Fed(NamedTuple):
    """What a feed-forward adds to the residual."""

    parts: list[Tensor]
    host: kernels.HostRows | None = None


class ExpertTable:
    """Where the experts are: a number for each, in memory of the device, so that a step finds them
    without the host."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.base = torch.empty(8, dtype=engine.dtype, device=engine.device)
        """Offsets are relative to it, in elements."""
        self.offsets = torch.full(
            (engine.n_layers, engine.n_experts), kernels.ABSENT, device=engine.device
        )
        self._changes = -1

    def update(self) -> bool:
        """Follows experts that have moved; whether some have."""
        if self._changes == self._engine.n_moves:
            return False
        self._changes = self._engine.n_moves
        self.offsets.copy_(torch.tensor([self._row(r) for r in self._engine.device_addresses()]))
        return True

    def _row(self, addresses: Sequence[int | None]) -> list[int]:
        start, size = self.base.data_ptr(), self.base.element_size()
        return [kernels.ABSENT if at is None else (at - start) // size for at in addresses]


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

    def __call__(self, tokens_B: Tensor, positions_B: Tensor, blocks_Bn: Tensor) -> Tensor:
        """The logits [B, V] after these tokens, the last of their sequences."""
        decoder = self._decoder
        residual = F.embedding(tokens_B, decoder.embedding)
        fed = Fed([])
        for number, layer in enumerate(decoder.layers):
            x = _add_norm(residual, fed, layer.attention_norm)
            y = self._attend(number, layer.attention, x, positions_B, blocks_Bn)
            x = _add_norm(residual, Fed([y]), layer.feed_norm)
            feed = layer.feed
            fed = self._experts(feed, x) if isinstance(feed, Experts) else Fed([feed(x)])
        x = _add_norm(residual, fed, decoder.norm)
        return _linear(x, decoder.head, decoder.head_bias)

    def _attend(
        self, layer: int, own: Attention, x: Tensor, positions: Tensor, blocks: Tensor
    ) -> Tensor:
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
        where = positions, blocks, self._block_size
        q = kernels.rotate_and_store(qkv, tables, norms, eps, *where, cache)
        y = kernels.attend(q, cache, *where, own.scale, own.window, own.sinks)
        return _linear(y, own.out, own.out_bias)

    def _experts(self, own: Experts, x: Tensor) -> Fed:
        wide = torch.float32 if own.wide_router else x.dtype
        logits = kernels.linear(x, own.router, own.router_bias, wide)
        host, layer = self._host, own.placeholder.layer
        choice = own.top_k, own.softmax_first, own.normalize, self._table.offsets[layer]
        buffers = None if host is None else host.buffers
        routed = kernels.route(logits, *choice, x, buffers)
        if host is not None:
            host.begin(layer)
        shape = own.placeholder.engine.shape
        y = kernels.experts(
            x, routed.weights, routed.offsets, self._table.base, shape.d_hidden, own.activation,
            shape.bias, shape.transposed,
        )  # fmt: skip
        parts = [y] if own.shared is None else [y, own.shared(x)]
        if host is None or routed.missed_B is None:
            return Fed(parts)
        host.end(layer)
        return Fed(parts, kernels.HostRows(host.buffers.out_RD, routed.missed_B))


def _add_norm(residual: Tensor, fed: Fed, norm: Norm) -> Tensor:
    return kernels.add_norm(residual, fed.parts, norm.weight, norm.eps, fed.host)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return kernels.linear(x, weight, bias) if len(x) == 1 else F.linear(x, weight, bias)


def _norm_rows(qkv: Tensor, own: Attention, norms: tuple[Norm, Norm]) -> Tensor:
    widths = [own.heads * own.width, own.kv_heads * own.width, own.kv_heads * own.width]
    q, k, v = qkv.split(widths, dim=1)
    q, k = (
        _add_norm(each.contiguous(), Fed([]), norm)
        for each, norm in zip((q, k), norms, strict=True)
    )
    return torch.cat((q, k, v), dim=1)
