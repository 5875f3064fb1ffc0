"""One decoding step of the common decoder structure: a token of each sequence of a batch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute import decode_triton as kernels
from overspill.moe.engine import Engine
from overspill.serve.decode.structure import Attention, Decoder, Experts, Norm

KeysValues = tuple[Tensor, Tensor]


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
        """Follows experts that have moved; whether all are on the device."""
        if self._changes != self._engine.n_moves:
            rows = [self._row(row) for row in self._engine.device_addresses()]
            self.offsets.copy_(torch.tensor(rows))
            self._changes = self._engine.n_moves
        return all(count == self._engine.n_experts for count in self._engine.homes)

    def _row(self, addresses: Sequence[int | None]) -> list[int]:
        start, size = self.base.data_ptr(), self.base.element_size()
        return [kernels.ABSENT if at is None else (at - start) // size for at in addresses]


class DecodeStep:
    """Computes logits with few, fused kernels. Reads nothing back to the host."""

    def __init__(
        self, decoder: Decoder, table: ExpertTable, cache: Sequence[KeysValues], block_size: int
    ) -> None:
        """`cache` has the keys and values of each layer."""
        self._decoder = decoder
        self._table = table
        self._cache = cache
        self._block_size = block_size

    def __call__(self, tokens_B: Tensor, positions_B: Tensor, blocks_Bn: Tensor) -> Tensor:
        """The logits [B, V] after these tokens, the last of their sequences."""
        decoder = self._decoder
        residual = F.embedding(tokens_B, decoder.embedding)
        parts: list[Tensor] = []
        for number, layer in enumerate(decoder.layers):
            x = _add_norm(residual, parts, layer.attention_norm)
            parts = [self._attend(number, layer.attention, x, positions_B, blocks_Bn)]
            x = _add_norm(residual, parts, layer.feed_norm)
            feed = layer.feed
            parts = self._experts(feed, x) if isinstance(feed, Experts) else [feed(x)]
        x = _add_norm(residual, parts, decoder.norm)
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

    def _experts(self, own: Experts, x: Tensor) -> list[Tensor]:
        wide = torch.float32 if own.wide_router else x.dtype
        logits = kernels.linear(x, own.router, own.router_bias, wide)
        offsets = self._table.offsets[own.placeholder.layer]
        choice = own.top_k, own.softmax_first, own.normalize
        _, weights, offsets = kernels.route(logits, *choice, offsets)
        shape = own.placeholder.engine.shape
        y = kernels.experts(
            x, weights, offsets, self._table.base, shape.d_hidden, own.activation, shape.bias,
            shape.transposed,
        )  # fmt: skip
        return [y] if own.shared is None else [y, own.shared(x)]


def _add_norm(residual: Tensor, parts: list[Tensor], norm: Norm) -> Tensor:
    return kernels.add_norm(residual, parts, norm.weight, norm.eps)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return kernels.linear(x, weight, bias) if len(x) == 1 else F.linear(x, weight, bias)


def _norm_rows(qkv: Tensor, own: Attention, norms: tuple[Norm, Norm]) -> Tensor:
    widths = [own.heads * own.width, own.kv_heads * own.width, own.kv_heads * own.width]
    q, k, v = qkv.split(widths, dim=1)
    q, k = (
        _add_norm(each.contiguous(), [], norm)
        for each, norm in zip((q, k), norms, strict=True)
    )
    return torch.cat((q, k, v), dim=1)
