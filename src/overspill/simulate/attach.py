"""Simulated routing in a real model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol, cast

from torch import nn

from overspill.core.errors import ConfigError
from overspill.core.routing import RoutingSource


class _RoutedLayer(Protocol):
    """The method of an `ExpertPlaceholder` that replaces its routing."""

    def routed_by(self, source: RoutingSource) -> AbstractContextManager[None]: ...


@contextmanager
def routed_by(model: nn.Module, source: RoutingSource) -> Iterator[None]:
    """Let `source` select the experts of an offloaded model within the block; the routing weights
    remain those of the model's routers."""
    layers = [p for p in model.parameters() if hasattr(p, "routed_by")]
    if not layers:
        raise ConfigError(
            "the model has no offloaded experts whose routing could be replaced; call "
            "overspill.offload(model) first"
        )
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(cast(_RoutedLayer, layer).routed_by(source))
        yield
