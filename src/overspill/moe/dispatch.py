"""Dispatch: tokens become rows sorted by expert, and rows become tokens again.

The dispatcher stands between the router and the engine. `LocalDispatcher` serves experts that are
in this process: rows are gathered as they are needed. With several ranks `RowExchange` gives it
the rows of all ranks for the experts of this one.

Shapes: T tokens, D model, E local experts, K top-k, R token rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from overspill.compute.permute import (
    Permutation,
    combine,
    count_rows,
    counts_of,
    gather_rows,
    row_weights,
    sum_rows,
    weights_grad,
)
from overspill.core.expert_map import ExpertMap
from overspill.transfer.streams import to_host

_ALL = slice(None)
_FEW_ROWS = 8192  # are sorted on the host, where that takes less time than the launches


@dataclass(eq=False)
class RoutedRows:
    """The assignments of one routing as token rows. Kept from forward to backward."""

    n_rows: int
    drops: bool
    counts: list[int] | None = None  # rows of each local expert, if the host knows them
    expert_ids_TK: Tensor | None = None  # to sort again; in host memory if there are few
    last: frozenset[int] = frozenset()  # positions whose rows come after all others
    sorted: Permutation | None = None
    routed_TK: Tensor | None = None  # the global ids
    experts: ExpertMap | None = None  # the positions they had

    @property
    def permutation(self) -> Permutation:
        assert self.sorted is not None, "the rows have not been sorted"
        return self.sorted

    @property
    def ends_E(self) -> Tensor:
        return self.permutation.ends_E

    @property
    def n_routed(self) -> int:
        """Rows that have an expert; rows without one come last."""
        if not self.drops:
            return self.n_rows
        assert self.counts is not None
        return sum(self.counts)


class Dispatcher(Protocol):
    """Rows of tokens sorted by local expert, whichever process the tokens are in."""

    def route(
        self,
        layer: int,
        expert_ids_TK: Tensor,
        drops: bool,
        need_counts: bool,
        may_resort: bool = False,
        unsorted: bool = False,
        counts: Mapping[int, int] | None = None,
    ) -> RoutedRows:
        """The order of the rows. With `need_counts` the host waits for the rows of each expert,
        unless `counts` are given, by the experts' ids. With `may_resort` the rows may be sorted
        anew by `sort`; with `unsorted` too, only the first call of `sort` sorts them."""

    def is_current(self, layer: int, order: RoutedRows) -> bool:
        """Whether experts are at the positions that they had when the rows were ordered."""

    def count(self, order: RoutedRows) -> None:
        """Let the host know the rows of each expert, if it does not yet."""

    def start_count(self, layer: int, expert_ids_TK: Tensor) -> Tensor:
        """The rows of each expert, in host memory when the device has come so far."""

    def sort(self, order: RoutedRows, last: frozenset[int]) -> None:
        """Sort the rows by expert; those of the experts `last` come after all others."""

    def dispatch(self, order: RoutedRows, x_TD: Tensor, start: int, stop: int) -> Tensor:
        """The token rows [start, stop), [stop - start, D]."""

    def row_weights(self, order: RoutedRows, weights_TK: Tensor, start: int, stop: int) -> Tensor:
        """The routing weights of the rows [start, stop)."""

    def assignments(self, order: RoutedRows, start: int, stop: int) -> Tensor:
        """The numbers of the assignments of the rows [start, stop): t*K + k, in any order of
        rows."""

    def combine(
        self,
        order: RoutedRows,
        y_RD: Tensor,
        weights_TK: Tensor | None,
        tokens: slice = _ALL,
    ) -> Tensor:
        """The weighted sum over its rows of each token in a range, [T, D]; without weights the
        sum."""

    def combine_grads(
        self, order: RoutedRows, dx_RD: Tensor, drow_weight_R: Tensor, tokens: slice = _ALL
    ) -> tuple[Tensor, Tensor]:
        """The gradients of a range of tokens [T, D] and of their routing weights [T, K]."""


class LocalDispatcher:
    """Orders rows of local experts. If all are local, global ids are positions, except in layers
    whose experts were swapped."""

    def __init__(self, maps: Sequence[ExpertMap], device: torch.device) -> None:
        """`maps` says which expert of each layer is at which position, and may change."""
        self._n_experts = maps[0].n_local
        self._maps = maps
        self._tables: dict[int, tuple[ExpertMap, Tensor]] = {}  # by layer: positions by global id
        self._device = device

    def _positions(self, layer: int, expert_ids_TK: Tensor) -> Tensor:
        experts = self._maps[layer]
        if experts.in_order and experts.is_whole:
            return expert_ids_TK
        known = self._tables.get(layer)
        if known is None or known[0] is not experts:
            numbers = [self._n_experts] * (experts.n_global + 1)  # no expert, or not a local one
            for position, global_id in enumerate(experts.local_ids):
                numbers[global_id] = position
            known = self._tables[layer] = experts, torch.tensor(numbers, device=self._device)
        return known[1][expert_ids_TK.to(torch.int64)]

    def is_current(self, layer: int, order: RoutedRows) -> bool:
        return order.experts is None or order.experts is self._maps[layer]

    def route(
        self,
        layer: int,
        expert_ids_TK: Tensor,
        drops: bool,
        need_counts: bool,
        may_resort: bool = False,
        unsorted: bool = False,
        counts: Mapping[int, int] | None = None,
    ) -> RoutedRows:
        order = RoutedRows(expert_ids_TK.numel(), drops)
        order.routed_TK, order.experts = expert_ids_TK, self._maps[layer]
        expert_ids_TK = self._positions(layer, expert_ids_TK)
        if counts is not None:
            order.counts = [counts[global_id] for global_id in self._maps[layer].local_ids]
        if may_resort and unsorted:
            self._count(order, expert_ids_TK)
            return order
        order.sorted = Permutation.build(expert_ids_TK, self._n_experts)
        order.expert_ids_TK = expert_ids_TK if may_resort else None
        if need_counts or drops:
            self.count(order)
        return order

    def start_count(self, layer: int, expert_ids_TK: Tensor) -> Tensor:
        counts_E = count_rows(self._positions(layer, expert_ids_TK), self._n_experts)
        host = torch.empty(
            counts_E.shape, dtype=counts_E.dtype, pin_memory=counts_E.device.type == "cuda"
        )
        return host.copy_(counts_E, non_blocking=True)

    def count(self, order: RoutedRows) -> None:
        if order.counts is None:
            order.counts = counts_of(to_host(order.permutation.ends_E)).tolist()

    def _count(self, order: RoutedRows, expert_ids_TK: Tensor) -> None:
        if order.n_rows <= _FEW_ROWS:
            ids_TK = to_host(expert_ids_TK.to(torch.int64))
            counts = np.bincount(ids_TK.numpy().reshape(-1), minlength=self._n_experts)
            order.counts = counts[: self._n_experts].tolist()
            order.expert_ids_TK = ids_TK
        else:
            order.counts = to_host(count_rows(expert_ids_TK, self._n_experts)).tolist()
            order.expert_ids_TK = expert_ids_TK

    def sort(self, order: RoutedRows, last: frozenset[int]) -> None:
        if order.sorted is not None and order.last == last:
            return
        ids_TK, counts = order.expert_ids_TK, order.counts
        assert ids_TK is not None
        assert counts is not None
        order.last = last
        if ids_TK.device.type == "cpu":
            order.sorted = Permutation.on_host(ids_TK, counts, last, self._device)
        else:
            order.sorted = Permutation.with_counts(ids_TK, counts, last)

    def dispatch(self, order: RoutedRows, x_TD: Tensor, start: int, stop: int) -> Tensor:
        return gather_rows(x_TD, order.permutation, start, stop)

    def row_weights(self, order: RoutedRows, weights_TK: Tensor, start: int, stop: int) -> Tensor:
        return row_weights(weights_TK, order.permutation, start, stop)

    def assignments(self, order: RoutedRows, start: int, stop: int) -> Tensor:
        return order.permutation.row_assignment_R[start:stop]

    def combine(
        self,
        order: RoutedRows,
        y_RD: Tensor,
        weights_TK: Tensor | None,
        tokens: slice = _ALL,
    ) -> Tensor:
        if order.drops:
            y_RD[order.n_routed :] = 0
        permutation = order.permutation.of_tokens(tokens)
        if weights_TK is None:
            return sum_rows(y_RD, permutation)
        return combine(y_RD, weights_TK[tokens], permutation)

    def combine_grads(
        self, order: RoutedRows, dx_RD: Tensor, drow_weight_R: Tensor, tokens: slice = _ALL
    ) -> tuple[Tensor, Tensor]:
        if order.drops:
            dx_RD[order.n_routed :] = 0
            drow_weight_R[order.n_routed :] = 0
        permutation = order.permutation.of_tokens(tokens)
        return sum_rows(dx_RD, permutation), weights_grad(drow_weight_R, permutation)
