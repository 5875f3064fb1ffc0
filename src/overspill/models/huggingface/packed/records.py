"""Records of experts that stay packed, from the tensors of a checkpoint."""

import torch
from torch import Tensor

from overspill.compute.packed_matrix import PackedMatrix
from overspill.compute.record_format import FormatBuilder, MixedFormat, RecordFormat, stored_parts
from overspill.compute.record_piece import CODES
from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertId
from overspill.core.packing import Kind
from overspill.models.huggingface.folder import CheckpointFolder
from overspill.models.huggingface.recipes import Recipes
from overspill.tiers.layout import NO_LOW_RANKS


class PackedExperts:
    """Source that reads experts as a checkpoint stores them. All experts of a layer must be packed
    in the same way, which is checked before any memory is allocated."""

    ranks = NO_LOW_RANKS

    def __init__(self, recipes: Recipes, folder: CheckpointFolder) -> None:
        self._recipes, self._folder = recipes, folder
        formats = [self._format_of_layer(layer) for layer in range(len(recipes.layers))]
        same = all(format == formats[0] for format in formats)
        self.format: RecordFormat | MixedFormat = (
            formats[0] if same else MixedFormat(tuple(formats))
        )

    def _format_of_layer(self, layer: int) -> RecordFormat:
        first = ExpertId(layer, 0)
        found = self._format_of(first)
        if not found.is_packed:
            raise ConfigError(
                f"{self._folder.folder} has no packed experts in layer {layer}, so they cannot "
                f"stay packed"
            )
        for index in range(1, self._recipes.layers[layer].n_experts):
            other = ExpertId(layer, index)
            if self._format_of(other) != found:
                names = [next(self._recipes.stored(expert))[1] for expert in (first, other)]
                raise ConfigError(
                    f"{self._folder.folder} packs {names[1]} in another way than {names[0]}, and "
                    "records of the experts of a layer must be the same"
                )
        return found

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the largest part of an expert."""
        return self.format.nbytes

    def _format_of(self, expert: ExpertId) -> RecordFormat:
        builder = FormatBuilder(self._recipes.layers[expert.layer].shape)
        for tensor, key, number in self._recipes.stored(expert):
            matrix, stored = self._stored(expert, tensor, key, number, read=False)
            rows = stored[CODES].shape[0] if matrix is None else matrix.shape[0]
            builder.add(tensor, rows, matrix, stored)
        return builder.build()

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        """Read one expert into its record, and check it."""
        sources = self._recipes.stored(expert)
        pieces = self.format.of_layer(expert.layer).pieces
        for piece, (tensor, key, number) in zip(pieces, sources, strict=True):
            _, stored = self._stored(expert, tensor, key, number, read=True)
            for name, part in stored.items():
                piece.stored[name].of(record).copy_(part)

    def _stored(
        self, expert: ExpertId, tensor: int, key: str, number: int, read: bool
    ) -> tuple[PackedMatrix | None, dict[str, Tensor]]:
        """Return the parts of a tensor of the checkpoint that records have; without `read` they
        have no values."""
        packed = self._folder.packed.get(key)
        if packed is not None and not packed.is_plain:
            if packed.matrix.scheme.kind is Kind.BLOCKS:
                raise ConfigError(
                    f"{self._folder.folder}: {packed.parts[CODES]} has {packed.kind}, which cannot "
                    f"stay packed"
                )
            matrix, parts = packed.matrix.by_rows(self._folder.read_parts(key, number, read))
            return matrix, stored_parts(parts)
        spec = self._folder.specs[key]
        size = self._recipes.layers[expert.layer].shape.sizes[tensor]
        shape = size if len(spec.shape) > len(size) else spec.shape
        plain = torch.empty(shape, dtype=spec.dtype, device="cpu" if read else "meta")
        if read:
            self._folder.read(key, number * plain.numel(), plain)
        return None, {CODES: plain}
