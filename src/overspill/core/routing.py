"""The interface of routing that replaces a model's routers."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class RoutingSource(Protocol):
    """Source of expert ids in place of a model's routers."""

    n_layers: int
    n_experts: int
    top_k: int

    def __call__(self, layer: int, n_tokens: int, device: "torch.device") -> "torch.Tensor":
        """Expert ids [T, K], int64, of the next tokens of a layer. Does not synchronize with the
        device."""


@runtime_checkable
class StepSource(Protocol):
    """A `RoutingSource` that can give the experts of all layers at once."""

    def all_layers(self, n_tokens: int, device: "torch.device") -> "torch.Tensor":
        """Expert ids [L, T, K], int64, of the next tokens of all layers."""
