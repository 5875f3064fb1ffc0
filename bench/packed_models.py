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

PLAIN = "bf16"
_SCALES = {torch.uint8: 120, torch.bfloat16: 0.0045, torch.float16: 0.0045, torch.float32: 3.3e-4}
"""By their type; weights are then as large as initial ones."""


class RandomExperts:
    """Experts with random codes, packed like those of a quantized checkpoint."""

    buffer_bytes = 0

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


def random_model(config: Any, name: str, **given: Any) -> Any:
    """A model for inference with random weights; its experts are packed as `name` says. `given` are
    budgets."""
    if name == PLAIN:
        return overspill.from_config(config, dtype=torch.bfloat16, train=False, quiet=True, **given)
    given.setdefault("settings", overspill.Settings())
    budgets = Budgets(**given, progress=False, quiet=True)
    made, model = random_dense(config, torch.bfloat16, False)

    def finish() -> None:
        made.restore(model)
        adapt(model, made.layers)

    source = RandomExperts(made.layers[0].shape, name)
    return move_experts(model, made.layers, budgets, source, finish)
