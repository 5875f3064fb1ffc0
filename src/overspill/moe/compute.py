"""The compute side of the engine: what a forward pass through a layer needs, and nothing else."""

import abc
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from overspill.compute.cpu_kernel import WeightGradient
from overspill.core.errors import OrderError
from overspill.core.experts import Phase
from overspill.moe.dispatch import Dispatcher
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.transfer.streams import StreamEvent


class CpuWork(Protocol):
    """Experts of a pass that the CPU is computing."""

    def take(self, out_RD: Tensor, drow_weight_R: Tensor | None = None) -> None:
        """Waits for them and writes their results into their rows: y, or in backward dx and the
        gradients of the routing weights."""

    @property
    def end(self) -> StreamEvent:
        """When their weights are not read any more, and their weight gradients are complete."""


class ExpertCompute(abc.ABC):
    """Brings experts to the device and computes them in waves.

    Experts are named by their local positions; `dispatcher` maps the router's ids to them.
    """

    def __init__(self, device: torch.device, dispatcher: Dispatcher, max_rows: int) -> None:
        self.device = device
        self.dispatcher = dispatcher
        self.max_rows = max_rows  # token rows of a wave, which bound its activations

    @abc.abstractmethod
    def enter_forward(
        self, layer_pass: LayerPass, expert_ids_TK: Tensor, phase: Phase, keep: bool
    ) -> None:
        """Begins a forward pass: orders the token rows and decides which side computes which
        expert. `phase` is BACKWARD for the recomputation of a checkpoint; with `keep` the rows keep
        their order until backward."""

    def follow_swaps(self, layer_pass: LayerPass) -> None:
        """Before a backward: if experts of the layer were swapped since the forward,
        orders the token rows anew."""
        layer, old = layer_pass.layer, layer_pass.rows
        if self.dispatcher.is_current(layer, old):
            return
        if layer_pass.kept is not None:
            raise OrderError(
                f"experts of layer {layer} were swapped since the forward, which kept "
                "activations in their order; run the forward again"
            )
        assert old.routed_TK is not None
        may_resort = old.expert_ids_TK is not None
        args = layer, old.routed_TK, layer_pass.drops
        layer_pass.order = self.dispatcher.route(*args, need_counts=True, may_resort=may_resort)
        layer_pass.on_cpu = frozenset()

    @abc.abstractmethod
    def enter_backward(self, layer_pass: LayerPass, need_dw: bool) -> None:
        """Begins the backward of a pass, with or without weight gradients; the CPU may get other
        experts than in forward."""

    @abc.abstractmethod
    def waves(
        self, layer_pass: LayerPass, phase: Phase, positions: Collection[int] | None = None
    ) -> Iterator[Wave]:
        """Yields the layer's experts, or those at some positions, as they become available on the
        device. Compute a wave before asking for the next."""

    def cpu_forward(self, layer_pass: LayerPass, x_TD: Tensor) -> CpuWork | None:
        """Starts the forward of the experts that the CPU computes, if there are any."""
        return None

    def cpu_backward(
        self,
        layer_pass: LayerPass,
        x_TD: Tensor,
        dy_TD: Tensor,
        weights_TK: Tensor,
        gradients: Mapping[int, WeightGradient],
    ) -> CpuWork | None:
        """Starts their backward. `gradients` are the places of their weight gradients, by position,
        if these are made."""
        return None
