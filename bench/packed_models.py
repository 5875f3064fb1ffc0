"""Random packed experts and models, made without a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import overspill
from overspill.compute.record_format import RecordFormat
from overspill.compute.record_piece import CODES
from overspill.core.experts import ExpertId, ExpertShape
from overspill.core.packing import QUANTIZATIONS, Kind
from overspill.models.budgets import Budgets
from overspill.models.huggingface.adapt import adapt
from overspill.models.huggingface.dictionaries import cast_routers
from overspill.models.huggingface.load import random_dense
from overspill.models.huggingface.packed.quantized import build_format
from overspill.models.offload import move_experts
from overspill.simulate import ReplayedRouting
from overspill.tiers.layout import NO_LOW_RANKS, LowRanks, RecordLayout

PLAIN = "bf16"
_SCALES = {torch.uint8: 120, torch.bfloat16: 0.0045, torch.float16: 0.0045, torch.float32: 3.3e-4}
"""Scales by type; weights are then as large as initial ones."""
_BLOCK = (1 << 22) - 3
"""Random values that are repeated, because drawing many gigabytes takes minutes. A prime number: no
row is repeated in a matrix."""
_TRACE = 16_384
"""Tokens of synthesized routing, which then begins again."""


class RandomExperts:
    """Experts with random codes, packed like those of a quantized checkpoint. All have the same
    random bytes, each from another start."""

    buffer_bytes, ranks = 0, NO_LOW_RANKS

    def __init__(self, shape: ExpertShape, name: str) -> None:
        """`name` is one of `QUANTIZATIONS`."""
        gate_apart = shape.gated and not shape.transposed
        dtypes, names = [torch.bfloat16] * len(shape.sizes), ["experts"] * len(shape.sizes)
        self.format: RecordFormat = build_format(shape, name, gate_apart, dtypes, names)
        finite = 0x77 if QUANTIZATIONS[name].kind is Kind.E4M3 else 0xFF  # no code is NaN
        generator = torch.Generator().manual_seed(0)
        most = max(piece.stored[CODES].end for piece in self.format.pieces)
        drawn = torch.empty(_BLOCK // 8 + 1, dtype=torch.int64).random_(generator=generator)
        drawn = drawn.view(torch.uint8)[:_BLOCK].bitwise_and_(finite)
        self._bytes = drawn.repeat(-(-(most + _BLOCK) // _BLOCK))

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        start = _start(expert)
        for piece in self.format.pieces:
            for field, stored in piece.stored.items():
                if piece.matrix is None:  # a bias
                    stored.of(record).zero_()
                elif field == CODES:
                    codes = record[stored.begin : stored.end]
                    codes.copy_(self._bytes[start : start + len(codes)])
                else:
                    stored.of(record).fill_(_SCALES[stored.dtype])


class RepeatedExperts:
    """Plain experts of random weights, as large as initial ones. Each has the same, from another
    place on."""

    buffer_bytes, format, ranks = 0, None, NO_LOW_RANKS

    def __init__(self, shape: ExpertShape) -> None:
        drawn = _normal_block().bfloat16() * 0.02
        self._values = drawn.repeat(-(-(shape.numel + _BLOCK) // _BLOCK))

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        start = _start(expert)
        record.copy_(self._values[start : start + len(record)])


class RandomAdapters:
    """Experts of another source, with random low-rank matrices behind their weights."""

    def __init__(self, source: Any, shape: ExpertShape, ranks: LowRanks) -> None:
        self._source, self.format, self.ranks = source, source.format, ranks
        self.buffer_bytes = source.buffer_bytes
        layout = RecordLayout(shape, torch.bfloat16, format=self.format, ranks=ranks)
        (numel, dtype), (self._bare, _) = layout.stored, layout.bare
        drawn = torch.randn((numel - self._bare) * dtype.itemsize // 2)
        self._behind = (0.02 * drawn).bfloat16().view(dtype)

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        self._source.fill(expert, record[: self._bare])
        record[self._bare :].copy_(self._behind)


def random_model(config: Any, name: str, ranks: LowRanks = NO_LOW_RANKS, **given: Any) -> Any:
    """A model for inference with random weights; its experts are packed as `name` says, and have an
    adapter of these ranks. `given` are budgets."""
    given.setdefault("settings", overspill.Settings())
    budgets = Budgets(**given, progress=False, quiet=True)
    with repeated_values():
        made, model = random_dense(config, torch.bfloat16, False)
    shape = made.layers[0].shape

    def finish() -> None:
        made.restore(model)
        cast_routers(model)
        adapt(model, made.layers)

    source = RepeatedExperts(shape) if name == PLAIN else RandomExperts(shape, name)
    adapted = RandomAdapters(source, shape, ranks)
    return move_experts(model, made.layers, budgets, adapted, finish)


def _start(expert: ExpertId) -> int:
    return 4099 * (1009 * expert.layer + expert.index) % _BLOCK


def _normal_block() -> Tensor:
    return torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))


@contextmanager
def repeated_values() -> Iterator[None]:
    """Within it transformers initializes weights in a second instead of half a minute."""
    from transformers import initialization

    drawn, functions = _normal_block(), initialization.TORCH_INIT_FUNCTIONS
    plain = functions["normal_"]

    @torch.no_grad()
    def normal(
        tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None
    ) -> Tensor:
        if tensor.numel() < _BLOCK or not tensor.is_contiguous():
            return plain(tensor, mean, std, generator)
        start = int(torch.randint(_BLOCK, ()))
        block, flat = (drawn.roll(start) * std + mean).to(tensor.dtype), tensor.view(-1)
        whole = len(flat) // _BLOCK
        flat[: whole * _BLOCK].view(whole, _BLOCK).copy_(block.expand(whole, -1))
        flat[whole * _BLOCK :].copy_(block[: len(flat) - whole * _BLOCK])
        return tensor

    functions["normal_"] = normal
    try:
        yield
    finally:
        functions["normal_"] = plain


WIDE_ROUTING = (
    "each group of 32 experts follows another part of the recording of gpt-oss-20b (24 layers, 32 "
    "experts, top-4), as does the second use of a layer; of the four experts recorded there for a "
    "token, so many are drawn as a group has of a token's experts"
)
"""Words for `wide_routing`."""


def wide_routing(path: Path, n_layers: int, n_experts: int, top_k: int) -> ReplayedRouting:
    """Routing of a model with more layers and experts than a recording has. The popularity of
    experts is that of the recording; with a third of them in an LRU, 0.57 of the uses hit (36
    layers of 128, top-4), and 0.60 in the recording."""
    with np.load(path, allow_pickle=False) as file:
        recorded_TLK = file["experts"]
    n_tokens, layers, choices = recorded_TLK.shape
    each = int(recorded_TLK.max()) + 1
    groups, uses = n_experts // each, -(-n_layers // layers)
    if n_experts % each or groups == 0 or top_k % groups or top_k // groups > choices:
        raise SystemExit(
            f"--routing {path}: {each} experts, {choices} of them for a token, do not make "
            f"{n_experts} with {top_k} for a token"
        )
    rng, length = np.random.default_rng(0), min(_TRACE, n_tokens)
    found: list[Any] = []
    for group in range(groups):
        of_layers = []
        for layer in range(n_layers):
            part = group * uses + layer // layers
            tokens = (np.arange(length) + part * n_tokens // (groups * uses)) % n_tokens
            of_layers.append(recorded_TLK[tokens, layer % layers])
        ids_TLK = np.stack(of_layers, 1)
        order = rng.random(ids_TLK.shape).argsort(-1)[..., : top_k // groups]
        found.append(np.take_along_axis(ids_TLK, order, -1) + each * group)
    ids = torch.from_numpy(np.concatenate(found, -1).astype(np.uint8))
    return ReplayedRouting(ids, n_experts)
