"""Gradients of experts that several nodes hold."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from overspill.parallel.ranks import Ranks

_PIECE = 1 << 24  # elements that are added up at once, in float32


class KeptGradients(Protocol):
    """Gradients that wait for `step()`. Experts are known by their numbers."""

    def kept(self) -> Collection[int]:
        """The experts that have one; waits until all of it is there."""

    def change_kept(self, number: int, change: Callable[[Tensor], None]) -> None:
        """Lets `change` change the flat gradient of an expert in place, or zeros if it has none."""


def add_replicas(
    replicas: Ranks, experts: Sequence[tuple[int, KeptGradients]], device: torch.device
) -> None:
    """Replaces the kept gradient of each expert by its sum over replicas: the same bits on all.
    `experts` are the same on all of them, in the same order. An expert that no replica has a
    gradient of gets none."""
    kept = {number for gradients in {part for _, part in experts} for number in gradients.kept()}
    has = replicas.largest([number in kept for number, _ in experts])
    for found, (number, gradients) in zip(has, experts, strict=True):
        if found:
            gradients.change_kept(number, partial(_add, replicas, device))


def _add(replicas: Ranks, device: torch.device, gradient: Tensor) -> None:
    for piece in gradient.split(_PIECE):
        # on the compute device, wherever it is kept: replicas may keep it in different places
        total = replicas.total(piece.to(device, torch.float32, copy=True))
        piece.copy_(total)
