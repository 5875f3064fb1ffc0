"""The experts of a model that one process holds."""

from dataclasses import dataclass

from overspill.core.expert_map import ExpertMap
from overspill.core.layer_map import LayerMap
from overspill.moe.row_placer import Sharing
from overspill.parallel.ranks import Ranks
from overspill.tiers.shared_experts import SharedExperts


@dataclass(frozen=True)
class ModelPart:
    """All experts of all layers, or the part of one rank."""

    layers: LayerMap
    experts: ExpertMap
    """The experts of each layer."""
    ranks: Ranks | None = None
    """The ranks that divide the model; None: this process holds all of it."""
    sharing: Sharing | None = None
    """Shared memory and costs of ranks that compute experts of each other; None: they do not."""

    @property
    def n_layers(self) -> int:
        """The number of layers of this process."""
        return len(self.layers.own)

    @property
    def shared(self) -> SharedExperts | None:
        """Host memory of experts that ranks share."""
        return None if self.sharing is None else self.sharing.shared
