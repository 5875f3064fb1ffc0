"""Interface of objects that take the gradients of experts and update the experts with them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from overspill.moe.layer_pass import Wave
from overspill.optim.arguments import AdamHyper


class GradientSink(ABC):
    """Takes the gradients of some experts and updates these experts with them.

    Order of calls: `allocate` once; in each backward of a layer `begin_backward`, `add` for each
    wave, `collect`, and `complete` if the gradient of the layer is complete; at the end of a step
    `check`, then `step`. `discard` may replace any of these and follows every failure.

    The caller holds the lock of the training step, so that calls come one at a time, and not the
    lock of the store, which the methods take themselves. Experts are known by their numbers,
    `layer * n_local + position`. With `hyper` a gradient completes that of the step, and its expert
    may be updated at once, with these numbers; without, the gradient is kept.

    Methods raise NonFiniteError for a gradient that is NaN or infinite, and the errors of worker
    threads; the caller then discards the gradients of all sinks.
    """

    @property
    @abstractmethod
    def has_updated(self) -> bool:
        """Whether experts were updated, or will be, since the last `step` or `discard`."""

    @abstractmethod
    def allocate(self, keep: bool) -> None:
        """Allocate memory for gradients, once; with `keep` for kept ones. Raises BudgetError."""

    @abstractmethod
    def reset_states(self) -> None:
        """Set the optimizer states to zero."""

    def begin_backward(self, shared: Mapping[int, tuple[int, ...]]) -> None:  # noqa: B027
        """Prepare for the gradients of a layer. `shared` are the ranks that compute each expert
        which its owner does not compute alone. May wait for other ranks."""

    @abstractmethod
    def add(
        self,
        layer: int,
        wave: Wave,
        dw: Sequence[Tensor],
        hyper: AdamHyper | None,
        more: bool = False,
    ) -> None:
        """Take the gradients of a wave, [n, ...] for each tensor of a record, which are changed.
        With `more` others are expected before `complete`. May wait for memory of gradients."""

    def collect(self, layer: int, hyper: AdamHyper | None) -> None:  # noqa: B027
        """After a backward of `begin_backward`: take the gradients that other ranks have computed
        for experts of this rank. Does not wait for them."""

    @abstractmethod
    def complete(self, layer: int, counts: Sequence[int] | None, hyper: AdamHyper | None) -> None:
        """The gradient of a layer is complete. `counts` are the token rows of the backward that
        completed it; None if none did. With `hyper` all experts that this backward has not updated
        are updated now, with their kept gradient or by decay; without, in `step`."""

    def wait_readers(self) -> None:  # noqa: B027
        """Wait until no copy and no computation reads weights in host memory."""

    @abstractmethod
    def kept(self) -> Collection[int]:
        """Return the experts with a kept gradient; waits until all of it is there."""

    @abstractmethod
    def change_kept(self, number: int, change: Callable[[Tensor], None]) -> None:
        """Let `change` change the flat gradient of an expert in place, or zeros if it has none."""

    @abstractmethod
    def squares(self) -> Mapping[int, float]:
        """Return the sum of squares of each kept gradient; waits for them."""

    @abstractmethod
    def check(self, kept: Mapping[int, AdamHyper]) -> None:
        """Raise NonFiniteError if a kept gradient of the layers in `kept` is not finite. Called for
        all sinks before `step` of any; waits for the gradients, changes no expert."""

    @abstractmethod
    def step(self, kept: Mapping[int, AdamHyper]) -> None:
        """Update the experts of the layers in `kept` with their kept gradients and end the step.
        Raises NonFiniteError if a gradient was not finite; its expert was not updated."""

    @abstractmethod
    def discard(self, layer: int | None = None) -> None:
        """Drop the gradients of a layer, or all; the experts stay as they are."""
