"""The host memory that the ranks of a node share, and the parts of each rank's.

Every word has one writer. A writer changes its word after the data that the word describes, a
reader looks at the word first; both take locks in between, which order their accesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overspill.core.expert_map import ExpertMap
from overspill.core.sizes import round_up
from overspill.tiers.layout import ALIGN

Words = NDArray[np.int64]


@dataclass(frozen=True)
class RankSizes:
    """Sizes of the parts of the shared memory of one rank."""

    experts: int  # its own ones, of all layers
    weight_bytes: int
    outbox_slots: int
    n_ranks: int

    @property
    def weights(self) -> int:
        return self.experts * self.weight_bytes

    @property
    def outbox_slot(self) -> int:
        """Bytes of a slot: a gradient, then the sum of its squares."""
        return self.weight_bytes + ALIGN

    @property
    def outbox(self) -> int:
        return self.outbox_slots * self.outbox_slot

    @property
    def n_words(self) -> int:
        return self.experts + self.outbox_slots + self.n_ranks * self.outbox_slots

    @property
    def total(self) -> int:
        return self.weights + self.outbox + round_up(8 * self.n_words, ALIGN)


class RankMemory:
    """The shared memory of one rank. The rank writes it, the others read it."""

    def __init__(self, memory: Tensor, sizes: RankSizes) -> None:
        self.sizes = sizes
        records = sizes.weights + sizes.outbox
        self.weights, self.outbox, words = memory.split(
            [sizes.weights, sizes.outbox, sizes.total - records]
        )
        counts = [sizes.experts, sizes.outbox_slots, sizes.n_ranks * sizes.outbox_slots]
        versions, sent, taken = words.view(torch.int64)[: sizes.n_words].split(counts)
        self.versions: Words = versions.numpy()
        """The version of the weights of each of its experts."""
        self.sent: Words = sent.numpy()
        """The pass whose gradient is in each slot of the outbox."""
        self.taken: Words = taken.view(sizes.n_ranks, sizes.outbox_slots).numpy()
        """The last pass of which this rank has taken the gradient in a slot, [rank, slot]."""

    def close(self) -> None:
        """Release the mapping, when no slab uses it any more."""
        self.weights = self.outbox = self.weights.new_empty(0)
        self.versions = self.sent = self.taken = np.empty(0, np.int64)


@dataclass(frozen=True)
class SharedExperts:
    """The shared memory of all ranks, as this one maps it."""

    rank: int
    memories: Sequence[RankMemory]
    parts: Sequence[ExpertMap]
    """The experts of a layer that each rank owns."""

    @property
    def own(self) -> RankMemory:
        return self.memories[self.rank]

    def progress(self) -> int:
        """A number that changes with each version of weights that a rank publishes."""
        return sum(int(memory.versions.sum()) for memory in self.memories)

    def close(self) -> None:
        for memory in self.memories:
            memory.close()
