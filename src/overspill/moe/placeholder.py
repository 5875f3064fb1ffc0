"""What a model keeps of experts that were offloaded."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overspill.compute.activation import Activation
from overspill.core.errors import OrderError
from overspill.moe.popularity import RoutingSource

if TYPE_CHECKING:
    from overspill.moe.engine import Engine


class ExpertPlaceholder(nn.Parameter):
    """Stands for the experts of one layer among the parameters of an offloaded model.

    It has no elements; optimizer groups that hold it apply to the experts of its layer.
    """

    engine: "Engine"
    layer: int
    keeper: object  # while any placeholder holds it, the engine stays open
    activation: Activation | None = None  # None: GELU or gated SiLU, by the experts' shape
    places: Any = None  # where the tensors of an expert lie in the plain model, if it is not ours
    drops = False  # whether a token may have fewer experts than its routing has places
    source: RoutingSource | None = None  # routes instead of the model's own router, if it is set
    is_expert_placeholder = True

    def __new__(cls, engine: "Engine", layer: int) -> "ExpertPlaceholder":
        data = torch.empty(0, dtype=engine.dtype, device=engine.device)
        self = torch.Tensor._make_subclass(cls, data, True)
        self.engine, self.layer = engine, layer
        return self

    @property
    def grad(self) -> Tensor | None:
        """The kept gradients as one number, so that a norm over the gradients of
        `model.parameters()` is that of the plain model. Setting or scaling it has no effect."""
        if not self.engine.can_train:
            return None
        norm = self.engine.training.waiting_norm(self.layer)
        return None if norm is None else norm.to(self.engine.device)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise OrderError("experts get their gradients from backward; .grad cannot be set")

    def __deepcopy__(self, memo: object) -> "ExpertPlaceholder":
        raise OrderError(
            "an offloaded model cannot be copied: its experts exist once, in the store"
        )
