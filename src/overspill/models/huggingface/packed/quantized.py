"""Packs experts while a plain checkpoint is read."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from overspill.compute.packed_matrix import PackedMatrix, Parts
from overspill.compute.quantize import BadWeight, quantize
from overspill.compute.record_format import FormatBuilder, RecordFormat, stored_parts
from overspill.compute.record_piece import CODES
from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.experts import ExpertId, ExpertShape
from overspill.core.packing import QUANTIZATIONS, Kind, Scheme
from overspill.models.huggingface.experts import HuggingFaceExperts, StackedExperts
from overspill.models.huggingface.recipes import Recipes, Tensors
from overspill.moe.state_dict import split_record
from overspill.tiers.layout import NO_LOW_RANKS

_PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_KINDS = ", ".join(QUANTIZATIONS)


def check_quantization(name: str) -> None:
    """Raise if `quantize` is unknown."""
    if name not in QUANTIZATIONS:
        raise ConfigError(f"quantize={name!r} is unknown; give one of {_KINDS}")


class QuantizedExperts:
    """Source that reads experts of a plain checkpoint and packs them. Records are equal to those of
    the packed checkpoint that `overspill export --quantize` makes of it."""

    ranks = NO_LOW_RANKS

    def __init__(self, recipes: Recipes, name: str) -> None:
        self._recipes = recipes
        check_plain(recipes.folder, recipes.keys, f"quantize={name!r} (--quantize)")
        self.format = quantized_format(recipes, name)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one expert in float32, and of its packed tensors."""
        return 4 * self._recipes.layers[0].shape.numel + self.format.nbytes

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        """Read one expert, and pack it into its record."""
        layer = self._recipes.layers[expert.layer]
        weights = torch.empty(layer.shape.numel)
        self._recipes.fill(expert, weights)
        names = [self._recipes.name(expert, number) for number in range(len(layer.shape.sizes))]
        pack_record(self.format, split_record(weights, layer.shape), names, record)


def pack_record(
    format: RecordFormat, tensors: Sequence[Tensor], names: Sequence[str], record: Tensor
) -> None:
    """Fill a record from the tensors of an expert in float32; errors call them `names`."""
    for piece in format.pieces:
        rows = tensors[piece.tensor][piece.begin : piece.begin + piece.rows]
        parts = {CODES: rows}
        if piece.matrix is not None:
            parts = stored_parts(quantize_matrix(rows, piece.matrix, names[piece.tensor]))
        for field, stored in piece.stored.items():
            stored.of(record).copy_(parts[field])


def quantize_matrix(plain: Tensor, matrix: PackedMatrix, name: str) -> Parts:
    """Return the parts of a plain matrix in float32; errors call it `name`."""
    try:
        return quantize(plain.T if matrix.is_transposed else plain, matrix.scheme)
    except BadWeight as error:
        raise CheckpointError(f"{name} {error}; it cannot be quantized") from error


def check_plain(folder: Tensors, names: Iterable[str], option: str) -> None:
    """Raise if one of these tensors is packed already; `option` would pack them."""
    for name in names:
        packed = folder.packed.get(name)
        if packed is not None and not packed.is_plain:
            raise ConfigError(
                f"{option}: {folder.folder} is quantized already ({name}: {packed.kind}); use it "
                "as it is, or give the checkpoint in bf16 that it was made from"
            )


def quantized_format(recipes: Recipes, name: str) -> RecordFormat:
    """Return the format of packed records of experts. Gates and up matrices are packed separately,
    as checkpoints store them. Raises if some matrices cannot be packed."""
    for number, experts in enumerate(recipes.layers):
        for index in range(experts.n_experts):
            _check_dtypes(recipes, ExpertId(number, index))
    layer, first = recipes.layers[0], ExpertId(0, 0)
    names = [recipes.name(first, number) for number in range(len(layer.shape.sizes))]
    return build_format(layer.shape, name, splits_gate(layer), recipes.dtypes(first), names)


def build_format(
    shape: ExpertShape,
    name: str,
    gate_apart: bool,
    dtypes: Sequence[torch.dtype],
    names: Sequence[str],
) -> RecordFormat:
    """Return the format of records whose matrices are packed as `name`, the gate separately if
    `gate_apart`. `dtypes` and `names` belong to the tensors of an expert; biases keep their dtype.
    Raises if groups do not divide rows."""
    scheme, builder = QUANTIZATIONS[name], FormatBuilder(shape)
    group = scheme.block[1] or 0
    for number, size in enumerate(shape.sizes):
        if len(size) == 1:  # a bias
            plain = torch.empty(size, dtype=dtypes[number], device="meta")
            builder.add(number, size[0], None, {CODES: plain})
            continue
        parts = 2 if number == 0 and gate_apart else 1
        matrix = _matrix(scheme, size, parts, shape.transposed)
        if scheme.block[0] == 1 and matrix.columns % group:
            raise ConfigError(
                f"quantize={name!r} (--quantize) packs groups of {group} weights, and rows of "
                f"{names[number]} have {matrix.columns}; give quantize='fp8', whose blocks may be "
                "partial, or leave it out"
            )
        stored = stored_parts(quantize(torch.zeros(matrix.rows, matrix.columns), matrix.scheme))
        for _ in range(parts):
            builder.add(number, size[0] // parts, matrix, stored)
    return builder.build()


def splits_gate(layer: HuggingFaceExperts) -> bool:
    """Return whether the first matrix of an expert is two matrices, one below the other."""
    return (
        isinstance(layer, StackedExperts)
        and layer.shape.gated
        and not layer.shape.transposed
        and bool(getattr(layer.module, "is_concatenated", False))
    )


def _matrix(scheme: Scheme, size: tuple[int, ...], parts: int, transposed: bool) -> PackedMatrix:
    if not transposed:
        return PackedMatrix(scheme, size[0] // parts, size[1])
    if scheme.kind is Kind.E2M1:  # as gpt-oss has it
        return PackedMatrix(Scheme(Kind.MXFP4_STACK, scheme.block), size[1], size[0])
    return PackedMatrix(scheme, size[1], size[0], transposed=True)


def _check_dtypes(recipes: Recipes, expert: ExpertId) -> None:
    for number, dtype in enumerate(recipes.dtypes(expert)):
        if dtype not in _PLAIN:
            raise ConfigError(
                f"{recipes.name(expert, number)} is {str(dtype).removeprefix('torch.')} in "
                f"{recipes.folder.folder}; only weights in bf16, fp16 and fp32 can be quantized"
            )
