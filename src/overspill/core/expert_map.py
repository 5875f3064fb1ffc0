"""Global expert ids and local positions of the experts of a layer that this process holds."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertMap:
    """Map from the global expert ids that a router names to positions among the local experts.

    Checkpoints, seeds and routers use global ids. Records, slots, counts and waves use positions.
    With one process both are the same until experts are swapped; with expert parallelism each
    process holds some of the ids.
    """

    n_global: int
    local_ids: tuple[int, ...]
    """The global id at each local position; in ascending order until experts are swapped."""

    @classmethod
    def whole(cls, n_experts: int) -> "ExpertMap":
        """The map of a layer whose experts are all local."""
        return cls(n_experts, tuple(range(n_experts)))

    @classmethod
    def of(cls, n_global: int, local_ids: Sequence[int]) -> "ExpertMap":
        ids = tuple(sorted(local_ids))
        assert len(set(ids)) == len(ids), "an expert is listed twice"
        assert all(0 <= id < n_global for id in ids), "an expert id is out of range"
        return cls(n_global, ids)

    @classmethod
    def part(cls, n_global: int, rank: int, n_ranks: int) -> "ExpertMap":
        """The map of one rank: consecutive ids. The first ranks hold one more where the number of
        ranks does not divide the number of experts."""
        each, more = divmod(n_global, n_ranks)
        first = rank * each + min(rank, more)
        return cls(n_global, tuple(range(first, first + each + (rank < more))))

    @property
    def n_local(self) -> int:
        return len(self.local_ids)

    @property
    def is_whole(self) -> bool:
        return self.n_local == self.n_global

    @functools.cached_property
    def in_order(self) -> bool:
        return all(a < b for a, b in itertools.pairwise(self.local_ids))

    def swapped(self, first: int, second: int) -> "ExpertMap":
        """The map after the experts at two positions have been swapped."""
        ids = list(self.local_ids)
        ids[first], ids[second] = ids[second], ids[first]
        return ExpertMap(self.n_global, tuple(ids))

    def global_id(self, position: int) -> int:
        return self.local_ids[position]

    def position(self, global_id: int) -> int:
        """The local position of an expert; KeyError if another process holds it."""
        try:
            return self.local_ids.index(global_id)
        except ValueError:
            raise KeyError(f"expert {global_id} is not held by this process") from None
