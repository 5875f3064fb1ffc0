"""Random packed experts and models, made without a checkpoint."""

from typing import Any

import torch
from torch import Tensor

import overspill
from overspill.compute.packed_matrix import PackedMatrix
from overspill.compute.quantize import quantize
from overspill.compute.record_format import CODES, FormatBuilder, RecordFormat, stored_parts
from overspill.core.experts import ExpertId, ExpertShape
from overspill.core.packing import QUANTIZATIONS, Kind
from overspill.models.budgets import Budgets
from overspill.models.huggingface.adapt import adapt
from overspill.models.huggingface.load import random_dense
from overspill.models.offload import move_experts
from overspill.tiers.layout import NO_LOW_RANKS, LowRanks, RecordLayout

PLAIN = "bf16"
_SCALES = {torch.uint8: 120, torch.bfloat16: 0.0045, torch.float16: 0.0045, torch.float32: 3.3e-4}
"""By their type; weights are then as large as initial ones."""


class RandomExperts:
    """Experts with random codes, packed like those of a quantized checkpoint."""

    buffer_bytes, ranks = 0, NO_LOW_RANKS

    def __init__(self, shape: ExpertShape, name: str) -> None:
        """`name` is one of `QUANTIZATIONS`."""
        scheme, builder = QUANTIZATIONS[name], FormatBuilder(shape)
        parts = 2 if shape.gated else 1
        sizes = [(0, shape.d_hidden, shape.d_model)] * parts
        for tensor, rows, columns in [*sizes, (1, shape.d_model, shape.d_hidden)]:
            like = stored_parts(quantize(torch.zeros(rows, columns), scheme))
            builder.add(tensor, rows, PackedMatrix(scheme, rows, columns), like)
        self.format: RecordFormat = builder.build()
        self._finite = 0x77 if scheme.kind is Kind.E4M3 else 0xFF  # no code is NaN

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        generator = torch.Generator().manual_seed(expert.layer << 20 | expert.index)
        for piece in self.format.pieces:
            for field, stored in piece.stored.items():
                if field == CODES:
                    plane = record[stored.begin : stored.end].view(torch.int64)
                    plane.random_(generator=generator)
                    plane.view(torch.uint8).bitwise_and_(self._finite)
                else:
                    stored.of(record).fill_(_SCALES[stored.dtype])


class PlainExperts:
    """Experts in bf16 with few different values: drawing all of them takes long."""

    buffer_bytes, format, ranks = 0, None, NO_LOW_RANKS

    def __init__(self, shape: ExpertShape) -> None:
        self._drawn = 0.02 * torch.randn(4, shape.numel)

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        record.copy_(self._drawn[expert.index % 4])


class RandomAdapters:
    """Experts of another source, with random low-rank matrices behind their weights."""

    def __init__(self, source: Any, shape: ExpertShape, ranks: LowRanks) -> None:
        self._source, self.format, self.ranks = source, source.format, ranks
        self.buffer_bytes = source.buffer_bytes
        self._layout = RecordLayout(shape, torch.bfloat16, format=self.format, ranks=ranks)
        numel, dtype = self._layout.stored
        bare, _ = self._layout.bare
        tail = (numel - bare) * dtype.itemsize // 2
        self._bare, self._tail = bare, (0.02 * torch.randn(tail)).bfloat16().view(dtype)

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        self._source.fill(expert, record[: self._bare])
        record[self._bare :].copy_(self._tail)


def adapted_model(config: Any, name: str, ranks: LowRanks, **given: Any) -> Any:
    """A model for inference with random weights, and random adapters of its experts."""
    budgets = Budgets(**given)
    made, model = random_dense(config, torch.bfloat16, False)

    def finish() -> None:
        made.restore(model)
        adapt(model, made.layers)

    shape = made.layers[0].shape
    source = PlainExperts(shape) if name == PLAIN else RandomExperts(shape, name)
    adapters = RandomAdapters(source, shape, ranks)
    return move_experts(model, made.layers, budgets, False, True, adapters, finish)


def random_model(config: Any, name: str, **given: Any) -> Any:
    """A model for inference with random weights; its experts are packed as `name` says. `given` are
    budgets."""
    if name == PLAIN:
        return overspill.from_config(config, dtype=torch.bfloat16, train=False, quiet=True, **given)
    given.setdefault("settings", overspill.Settings())
    budgets = Budgets(**given)
    made, model = random_dense(config, torch.bfloat16, False)

    def finish() -> None:
        made.restore(model)
        adapt(model, made.layers)

    source = RandomExperts(made.layers[0].shape, name)
    return move_experts(model, made.layers, budgets, False, True, source, finish)
