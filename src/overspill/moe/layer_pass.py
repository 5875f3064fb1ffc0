"""One pass of tokens through the experts of a layer, and the waves it is computed in."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from overspill.compute.activation import Activation
from overspill.compute.dropout import Dropout
from overspill.compute.low_rank import NO_ADAPTERS, Adapters
from overspill.moe.adapters import LayerAdapters
from overspill.moe.dispatch import RoutedRows
from overspill.parallel.row_exchange import SentRows


class PendingBackward:
    """Token of a forward whose backward is pending. It outlives its pass if the graph is freed."""


@dataclass(eq=False)
class LayerPass:
    """One pass of tokens through one layer, from its forward to its backward."""

    layer: int
    training: bool = False  # a backward will follow
    trained: bool = True  # the weights of the layer's experts need gradients
    drops: bool = False  # an id of `n_experts` means "no expert"
    activation: Activation | None = None
    dropout: Dropout | None = None  # inside the experts
    adapters: LayerAdapters | None = None  # while the layer is computed
    order: RoutedRows | None = None
    sent: SentRows | None = None  # rows of other ranks too, with several
    on_cpu: frozenset[int] = frozenset()  # positions of experts that the CPU computes
    kept: Tensor | None = None  # pre-activations, if they are kept for backward
    received: Tensor | None = None  # token rows of all ranks, if they are kept for backward
    pending: PendingBackward = field(default_factory=PendingBackward)

    @property
    def rows(self) -> RoutedRows:
        assert self.order is not None, "the pass has not been routed"
        return self.order

    def adapters_of(self, wave: "Wave") -> Adapters:
        if self.adapters is None:
            return wave.adapters
        return self.adapters.of_wave(wave.first, wave.stop)

    @property
    def known_counts(self) -> dict[int, int] | None:
        """Token rows of each local expert, by its id, if they are known before they are ordered."""
        return None if self.sent is None else self.sent.counts

    def group_positions(self, number: int) -> frozenset[int] | None:
        """The positions of the experts of a group of token rows now; None: the group has all of
        them."""
        assert self.sent is not None
        assert self.rows.experts is not None
        if len(self.sent.groups) == 1:
            return None
        experts = self.sent.groups[number].experts
        ids = self.rows.experts.local_ids
        return frozenset(position for position, id in enumerate(ids) if id in experts)

    @property
    def device_counts(self) -> list[int]:
        """Token rows of each expert that the device computes."""
        counts = self.rows.counts
        assert counts is not None
        if not self.on_cpu:
            return counts
        return [0 if position in self.on_cpu else n for position, n in enumerate(counts)]

    @property
    def cpu_rows(self) -> slice:
        """The token rows of experts that the CPU computes: they are the last ones."""
        counts = self.rows.counts
        assert counts is not None
        total = sum(counts)
        return slice(total - sum(counts[position] for position in self.on_cpu), total)


@dataclass(frozen=True)
class Wave:
    """Neighbouring experts [first, stop) of a layer that compute together on token rows
    [start, end)."""

    first: int
    stop: int
    start: int
    end: int
    weights: Tensor
    ends: Tensor
    counts: list[int] | None
    adapters: Adapters = NO_ADAPTERS
    """The low-rank parts in their records."""

    @classmethod
    def of(
        cls,
        rows: RoutedRows,
        starts: Sequence[int],
        counts: list[int],
        run: range,
        weights: Tensor,
    ) -> "Wave":
        """The wave of the experts `run`; their weights follow each other. `starts` and `counts` are
        those of the rows of all experts."""
        first, stop, start = run.start, run.stop, starts[run.start]
        ends = rows.ends_E[first:stop]
        if start:
            ends = ends - start
        return cls(first, stop, start, starts[stop], weights, ends, counts[first:stop])
