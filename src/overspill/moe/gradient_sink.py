"""Where the gradients of experts go."""

import abc
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from overspill.moe.layer_pass import Wave
from overspill.optim.kernel import AdamHyper


class GradientSink(abc.ABC):
    """Takes the gradients of experts and updates the experts with them.

    `TrainingStep` decides when a gradient is complete and passes the numbers of the update
    (`AdamHyper`) then; the sink carries it out where the experts are.
    """

    @abc.abstractmethod
    def attach(self, state_dtype: torch.dtype, keep: bool) -> None:
        """Allocates the optimizer states once, and with `keep` memory for kept gradients."""

    @abc.abstractmethod
    def reset_states(self) -> None:
        """Sets all optimizer states to zero."""

    @abc.abstractmethod
    def expect_more(self) -> None:
        """Before the first gradients of a step that further ones will be added to."""

    @abc.abstractmethod
    def add(
        self,
        layer: int,
        wave: Wave,
        dw: Sequence[Tensor],
        hyper: AdamHyper | None,
        more: bool = False,
    ) -> None:
        """Takes the gradients of a wave, [n, ...] for each tensor of a record. With `hyper` they
        complete the step's gradient and the experts may be updated now; without, they are kept,
        and with `more` others are expected to be added before `complete_layer`."""

    @abc.abstractmethod
    def complete_layer(
        self, layer: int, counts: Sequence[int] | None, hyper: AdamHyper | None
    ) -> None:
        """The layer's gradient is complete. `counts` are the token rows of the backward that
        completed it; None if none did. With `hyper` all experts that this backward did not update
        are updated now, with their kept gradient or by decay; without, in `end_step`."""

    @property
    @abc.abstractmethod
    def has_updated(self) -> bool:
        """Whether experts were updated, or will be, since the last `end_step` or `discard`."""

    @abc.abstractmethod
    def sum_of_squares(self) -> float:
        """Sum of squares of all kept gradients; waits for them."""

    @abc.abstractmethod
    def end_step(self, kept: Mapping[int, AdamHyper]) -> None:
        """Updates the experts of the layers in `kept` with their kept gradients and ends the step.
        Raises NonFiniteError if a gradient was not finite."""

    @abc.abstractmethod
    def discard(self, layer: int | None = None) -> None:
        """Drops the kept gradients of a layer, or all; the experts stay as they are."""
