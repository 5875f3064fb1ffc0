"""The MoE layers of a model that this process holds, and its pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StagePart:
    """Part of the model in one stage."""

    blocks: range
    layers: range
    """Numbers of its MoE layers in the whole model."""


@dataclass(frozen=True)
class LayerMap:
    """The MoE layers of a model that an engine has.

    Engines number their own layers from 0; checkpoints use the numbers in the whole model. They
    differ where ranks divide the stages.
    """

    n_layers: int
    """Number of MoE layers of the whole model."""
    own: tuple[int, ...]
    """The numbers of this engine's layers in the whole model, ascending."""
    stages: tuple[StagePart, ...] = ()
    """All stages; empty if the model is not divided into stages."""

    @classmethod
    def whole(cls, n_layers: int) -> "LayerMap":
        return cls(n_layers, tuple(range(n_layers)))

    @classmethod
    def of_rank(cls, stages: Sequence[StagePart], rank: int, n_ranks: int) -> "LayerMap":
        """The layers of one rank: neighbouring stages are on different ranks."""
        own = [layer for stage in stages[rank::n_ranks] for layer in stage.layers]
        return cls(stages[-1].layers.stop, tuple(own), tuple(stages))

    @property
    def is_whole(self) -> bool:
        return len(self.own) == self.n_layers
