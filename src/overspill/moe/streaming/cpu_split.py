"""The choice of the experts of a pass that the CPU computes: `plan.split`, given the figures of the
engine."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from overspill.core.experts import Phase
from overspill.hardware.profile import ExpertCosts
from overspill.moe.settings import CpuPolicy
from overspill.moe.streaming.step_cursor import StepCursor
from overspill.plan.split import SplitCosts, pass_time, split

_LEARNING_RATE = 0.2
"""Weight of the newest measurement of a gap or a pace."""
_DECAY = 0.995
"""Share of measured figures that is left after each pass without CPU experts: they are not measured
then, and may come from a first pass, in which kernels were compiled, or from a time of other
load."""
_SLOWEST_PACE = 10.0
_HANDOVER_GROWTH = 1.01
"""Largest growth of the measured handover from one pass to the next."""
_SHORTEST_HANDOVER = 1e-5
_AS_GOOD = 1.1
"""A forward's split is kept for backward unless the best one is faster by more than this."""
_CACHED_COUNTS = 4096


class OnDevice(NamedTuple):
    """Experts of a layer that are on the device or on their way."""

    resident: set[int]  # from an earlier pass: they need no upload
    uploaded: set[int]  # uploaded for the next pass
    passes: int = 1
    """Passes through the layer, from the current or next one on, in which the device keeps them."""


class RowLimits(NamedTuple):
    """Token rows of which the CPU may make weight gradients in a backward."""

    of_expert: int
    of_pass: int


class Optimizer(Protocol):
    """The optimizer of experts, which works on the same cores, as the split sees it."""

    def row_limits(self) -> RowLimits | None:
        """The limits; None without limits."""

    def seconds(self, layer: int, phase: Phase, need_dw: bool) -> float:
        """Seconds that all cores update experts during a pass through a layer."""


class _Kind(NamedTuple):
    """The kind of a pass."""

    phase: Phase
    need_dw: bool = False  # weight gradients too


class CpuSplit:
    """Decides for the current pass by its routing, and for later ones by expected counts. Used
    under the store's lock."""

    def __init__(
        self,
        cursor: StepCursor,
        costs: ExpertCosts | None,
        max_rows: int,
        max_rows_per_expert: Callable[[Phase], int],
        on_device: Callable[[int], OnDevice],
        readable: Callable[[int, int], bool],
        policy: CpuPolicy | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """`max_rows` bounds the token rows of a pass on the CPU, `max_rows_per_expert` those of one
        expert; `readable(layer, position)` says whether an expert's weights are in host memory.
        `policy` decides instead of `costs`; one of them is given."""
        assert costs is not None or policy is not None
        self._policy = policy
        self._optimizer = optimizer
        self._cursor = cursor
        self.costs = costs
        self._max_rows = max_rows
        self._max_rows_per_expert = max_rows_per_expert
        self._on_device = on_device
        self._readable = readable
        self._enabled = True
        self._allowed: dict[int, bool] = {}  # in the current or last pass through each layer
        self._trained: dict[int, bool] = {}  # whether its backward makes weight gradients
        self._current: frozenset[int] = frozenset()
        self._forward: dict[int, frozenset[int]] = {}  # the last forward's split of each layer
        self._ahead: dict[int, tuple[Sequence[float], frozenset[int]]] = {}
        self._costs: dict[_Kind, SplitCosts] = {}
        self._gaps: dict[_Kind, float] = {}
        self._paces: dict[_Kind, float] = {}
        self._handover = 0.0 if costs is None else costs.round_trip

    def set_enabled(self, enabled: bool) -> None:
        self._enabled = enabled

    def enter(self, layer: int, allowed: bool, trained: bool = False) -> bool:
        """A pass begins; `allowed` is whether the CPU may compute experts in it, `trained` whether
        its backward makes weight gradients. Returns whether it may: who computes what depends on
        timing, so not under deterministic algorithms."""
        self._trained[layer] = trained
        deterministic = torch.are_deterministic_algorithms_enabled()
        self._allowed[layer] = allowed and self._enabled and not deterministic
        self._current = frozenset()
        return self._allowed[layer]

    def _may_get(self, layer: int) -> bool:
        """Whether the CPU may get experts of the layer, as far as is known."""
        return self._enabled and self._allowed.get(layer, False)

    def likely(self, layer: int) -> bool:
        """Whether the CPU is expected to get experts of the pass that is about to begin."""
        if not self._may_get(layer):
            return False
        counts, _ = self._cursor.expected(layer)
        return counts is None or bool(self._plan(layer, counts, Phase.FORWARD))

    def decide(
        self,
        layer: int,
        counts: Sequence[int],
        phase: Phase,
        before: frozenset[int],
        need_dw: bool = False,
    ) -> frozenset[int]:
        """The experts of the current pass that the CPU computes: those of `before`, for which the
        rows are sorted, unless others are clearly better. With `need_dw` the pass makes weight
        gradients."""
        self._current = frozenset()
        if self._may_get(layer):
            kind = _Kind(phase, need_dw)
            chosen = self._choose(layer, counts, kind, before)
            self._current = frozenset(p for p in chosen if self._readable(layer, p))
            if not self._current:
                self._fade(kind)
        if phase is Phase.FORWARD:
            self._forward[layer] = self._current
        return self._current

    def _choose(
        self, layer: int, counts: Sequence[int], kind: _Kind, before: frozenset[int]
    ) -> frozenset[int]:
        present = self._on_device(layer)
        limit, max_rows = self._limits(kind)
        if self._policy is not None:
            chosen = []
            for position in sorted(self._policy(counts, kind.phase)):
                if 0 < counts[position] <= min(limit, max_rows):
                    chosen.append(position)
                    max_rows -= counts[position]
            return frozenset(chosen)
        costs = self._costs_of(layer, kind)
        if present.passes > 1:  # in a stage; a pass has its share of an upload
            load, beside = costs.load / present.passes, costs.load_beside / present.passes
            costs = replace(costs, load=load, load_beside=beside)
        # an expert with too many rows for the CPU's kernel counts as uploaded
        fixed = present.uploaded | {p for p, count in enumerate(counts) if count > limit}
        best = split(counts, present.resident, costs, max_rows, fixed)
        if not best or not before or before == best or not before.isdisjoint(fixed):
            return best
        if sum(counts[position] for position in before) > max_rows:
            return best
        times = [pass_time(counts, present.resident, on_cpu, costs) for on_cpu in (before, best)]
        return before if times[0] <= _AS_GOOD * times[1] else best

    def _limits(self, kind: _Kind) -> RowLimits:
        """Limits of the rows that a pass computes on the CPU."""
        limits = RowLimits(self._max_rows_per_expert(kind.phase), self._max_rows)
        if kind.need_dw and self._optimizer is not None:
            others = self._optimizer.row_limits()
            if others is not None:
                return RowLimits(*map(min, limits, others))
        return limits

    def is_small(self, counts: Sequence[int], phase: Phase) -> bool:
        """Whether these token rows take the GPU less time than an upload, beyond the launches: then
        it may wait for all experts and compute them as one wave."""
        if self.costs is None:
            return False
        times = self.costs.gpu_forward if phase is Phase.FORWARD else self.costs.gpu_backward
        least = times(1)
        return sum(times(count) - least for count in counts if count) < self.costs.load

    def uploads(self, layer: int, positions: range) -> list[int]:
        """The experts of a layer, among `positions`, that are uploaded, in their order."""
        counts, _ = self._cursor.expected(layer)
        busy = [position for position in self._cursor.busy(layer) if position in positions]
        if counts is None or not self._may_get(layer):
            return busy
        current = layer == self._cursor.here.layer
        on_cpu = self._current if current else self._plan(layer, counts)
        # the busiest first: if time runs out, the CPU is left with the others
        rest = [position for position in busy if position not in on_cpu]
        return sorted(rest, key=lambda p: (-counts[p], p)) if on_cpu else rest

    def uploads_all(self, layer: int) -> bool:
        """Whether every expert of a layer will certainly be uploaded: then nothing more urgent than
        one of them can come."""
        counts, _ = self._cursor.expected(layer)
        if counts is None or min(counts) < 1:
            return False
        return not self._may_get(layer) or not self._plan(layer, counts)

    def _plan(
        self, layer: int, counts: Sequence[float], phase: Phase | None = None
    ) -> frozenset[int]:
        known = self._ahead.get(layer)
        if known is None or known[0] is not counts:
            phase = phase or self._cursor.next_phase(layer)
            before: frozenset[int] = frozenset()
            if phase is Phase.BACKWARD:  # the rows are sorted already
                before = self._forward.get(layer, before)
            whole = [round(count) for count in counts]
            need_dw = phase is Phase.BACKWARD and self._trained.get(layer, False)
            known = counts, self._choose(layer, whole, _Kind(phase, need_dw), before)
            self._ahead[layer] = known
        return known[1]

    # -- measurements -------------------------------------------------------------------------

    def note_gap(self, phase: Phase, seconds: float, need_dw: bool = False) -> None:
        """The time from the end of a layer's experts until the CPU had rows of the next: only
        uploads go on meanwhile."""
        if self.costs is None:
            return
        # beyond this the CPU gets nothing: how much more does not matter
        seconds = min(seconds, 2 * self._cursor.n_local * self.costs.load)
        kind = _Kind(phase, need_dw)
        before = self._gaps.get(kind, 0.0)  # the first one may include compilation
        self._gaps[kind] = before + _LEARNING_RATE * (seconds - before)

    def note_job(
        self,
        phase: Phase,
        counts: Sequence[int],
        seconds: float,
        need_dw: bool = False,
        factored: Sequence[int] = (),
    ) -> None:
        """Note the seconds that the CPU took for experts with these token rows: the profile was
        measured on idle cores. `factored` are the rows of experts whose weight gradients are formed
        in their updates, on the same cores: the job does not include that work, the costs do."""
        if self.costs is None:
            return
        kind = _Kind(phase, need_dw)
        expected = sum(map(self._measured(kind).cpu, counts))
        expected += sum(map(self._measured(_Kind(phase)).cpu, factored))
        pace = min(_SLOWEST_PACE, seconds / expected)
        before = self._paces.get(kind, 1.0)
        self._paces[kind] = before + _LEARNING_RATE * (pace - before)

    def note_handover(self, seconds: float) -> None:
        """The time to the CPU and back, or longer where the GPU ended last: the shortest recent one
        counts."""
        if self.costs is None:
            return
        slowest = min(self.costs.round_trip, _HANDOVER_GROWTH * self._handover)
        self._handover = min(slowest, max(_SHORTEST_HANDOVER, seconds))

    def _fade(self, kind: _Kind) -> None:
        if kind in self._gaps:
            self._gaps[kind] *= _DECAY
        if kind in self._paces:
            self._paces[kind] += (1 - _DECAY) * (1 - self._paces[kind])

    def _costs_of(self, layer: int, kind: _Kind) -> SplitCosts:
        known, pace = self._measured(kind), self._paces.get(kind, 1.0)
        fixed = self._handover + self._gaps.get(kind, 0.0)
        if self._optimizer is not None and self._trained.get(layer, False):
            fixed += self._optimizer.seconds(layer, *kind)
        return replace(known, cpu=lambda count: pace * known.cpu(count), fixed=fixed)

    def _measured(self, kind: _Kind) -> SplitCosts:
        known = self._costs.get(kind)
        if known is None:
            known = self._costs[kind] = self._split_costs(kind)
        return known

    def _split_costs(self, kind: _Kind) -> SplitCosts:
        own = self.costs
        assert own is not None
        cpu, gpu = own.cpu_forward, own.gpu_forward
        if kind.need_dw:
            cpu, gpu = own.cpu_training, own.gpu_training
        elif kind.phase is Phase.BACKWARD:
            cpu, gpu = own.cpu_backward, own.gpu_backward

        @functools.lru_cache(_CACHED_COUNTS)  # asked for the same few numbers all the time
        def cpu_beside(count: int) -> float:
            return own.cpu_beside * cpu(count)

        times = functools.lru_cache(_CACHED_COUNTS)(gpu)
        return SplitCosts(own.load, own.load_beside, cpu_beside, times, fixed=0.0)
