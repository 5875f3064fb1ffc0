"""Records whose size differs by layer."""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch

from overspill.core.experts import ExpertShape
from overspill.tiers.layout import ALIGN, NO_LOW_RANKS, LowRanks, RecordLayout


class LayerBytes(NamedTuple):
    """A format of so many bytes."""

    nbytes: int

    def unpack(self, *_: object) -> NoReturn:
        raise AssertionError("nothing is computed")

    unpack_several = unpack


class MixedBytes(NamedTuple):
    """The formats of layers."""

    layers: tuple[LayerBytes, ...]

    @property
    def nbytes(self) -> int:
        return max(layer.nbytes for layer in self.layers)

    def of_layer(self, layer: int) -> LayerBytes:
        return self.layers[layer]


def mixed_layout(pages: Sequence[int], ranks: LowRanks = NO_LOW_RANKS) -> RecordLayout:
    """Weights of each layer that end in the last of so many pages."""
    format = MixedBytes(tuple(LayerBytes(ALIGN * count - 64) for count in pages))
    return RecordLayout(ExpertShape(8, 4, gated=False), torch.float32, format=format, ranks=ranks)
