"""Who computes which expert: the plan of `plan.split`, fed with what the engine knows."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from overspill.core.experts import Phase
from overspill.hardware.profile import ExpertCosts
from overspill.moe.course import Course
from overspill.plan.split import SplitCosts, pass_time, split

_LEARN = 0.2
"""What the newest gap or pace counts for."""
_FORGET = 0.995
"""What is left of them after each pass that gave the CPU nothing: they are not measured then, and
may have been those of a first pass, in which kernels were compiled, or of busy neighbours."""
_SLOWEST = 10.0
"""A pace beyond which it does not matter."""
_RISE = 1.01
"""How much longer the way to the CPU may seem to have become from one pass to the next."""
_LEAST = 1e-5
"""Seconds that it takes at least."""
_AS_GOOD = 1.1
"""A split of the forward serves for backward too if the best one would not be faster by more."""

_KNOWN = 4096
"""Numbers of tokens whose times are remembered."""


class Present(NamedTuple):
    """Experts of a layer that are on the device or on their way."""

    resident: set[int]  # from an earlier pass: they cost the link nothing
    uploaded: set[int]  # for the next one


Choose = Callable[[Sequence[int], Present, Phase], frozenset[int]]


class Sharing:
    """Decides for the pass of now, by its real tokens, and for those ahead, by the expected ones.
    Read and changed under the store's lock."""

    def __init__(
        self,
        course: Course,
        costs: ExpertCosts | None,
        max_rows: int,
        present: Callable[[int], Present],
    ) -> None:
        self.course = course
        self.costs = costs
        self.max_rows = max_rows
        self.on = costs is not None
        self.trained = False  # whether the passes of now end in updates by the CPU
        self.choose: Choose = self._choose
        self._present = present
        self._here: frozenset[int] = frozenset()
        self._forward: dict[int, frozenset[int]] = {}  # of each layer, lately
        self._ahead: dict[int, tuple[Sequence[float], frozenset[int]]] = {}
        self._costs: dict[Phase, SplitCosts] = {}
        self._gaps: dict[Phase, float] = {}
        self._paces: dict[Phase, float] = {}
        self._handover: float | None = None

    @property
    def open(self) -> bool:
        """Whether the CPU may have time to give at all. Who computes what goes by the clock, which
        is nothing for runs that are to repeat to the bit."""
        if not self.on or torch.are_deterministic_algorithms_enabled():
            return False
        # the optimizer needs the cores when experts are trained
        return self.costs is None or not self.trained

    def likely(self, layer: int) -> bool:
        """Whether the CPU will have a share in the pass that is about to begin, as far as is known
        before its tokens are."""
        if not self.open:
            return False
        tokens, _ = self.course.popularity.expected(layer, Phase.FORWARD)
        return tokens is None or bool(self._plan(layer, tokens, Phase.FORWARD))

    def decide(
        self,
        layer: int,
        counts: Sequence[int],
        phase: Phase,
        before: frozenset[int] = frozenset(),
    ) -> frozenset[int]:
        """The experts of the pass that begins which the CPU computes. Those of `before`, for which
        the rows are sorted, if others are not clearly better."""
        self._here = frozenset()
        if self.open:
            present = self._present(layer)
            self._here = self._settle(counts, present, phase, before)
            if not self._here:
                self._forget(phase)
        if phase is Phase.FORWARD:
            self._forward[layer] = self._here
        return self._here

    def _settle(
        self, counts: Sequence[int], present: Present, phase: Phase, before: frozenset[int]
    ) -> frozenset[int]:
        """The best split, or `before` if it is about as good and nothing of it was uploaded."""
        best = self.choose(counts, present, phase)
        if not best or not before or before == best or self.costs is None:
            return best
        if not before.isdisjoint(present.uploaded):
            return best
        costs, resident = self._costs_of(phase), present.resident
        times = [pass_time(counts, resident, on_cpu, costs) for on_cpu in (before, best)]
        return before if times[0] <= _AS_GOOD * times[1] else best

    def is_small(self, counts: Sequence[int], phase: Phase) -> bool:
        """Whether these tokens take the device less time than an upload, beyond what launching
        takes anyway: then it may as well wait for all experts and compute them as one wave."""
        if self.costs is None:
            return False
        times = self.costs.gpu_forward if phase is Phase.FORWARD else self.costs.gpu_backward
        least = times(1)
        return sum(times(count) - least for count in counts if count) < self.costs.load

    def keep(self, on_host: frozenset[int]) -> None:
        """The pass that begins has its experts divided already."""
        self._here = on_host

    def uploads(self, layer: int, indices: range) -> list[int]:
        """Which of these experts of a layer go to the device, and in which order."""
        tokens, _ = self.course.expected(layer)
        busy = [index for index in self.course.busy(layer) if index in indices]
        if tokens is None or not self.open:
            return busy
        on_host = self._here if layer == self.course.here.layer else self._plan(layer, tokens)
        # the most popular first: should time run out, the CPU is left with the others
        there = [index for index in busy if index not in on_host]
        return sorted(there, key=lambda index: (-tokens[index], index)) if on_host else there

    def takes_all(self, layer: int) -> bool:
        """Whether every expert of a layer will surely have to be on the device: then nothing more
        urgent than one of them can come up."""
        tokens, _ = self.course.expected(layer)
        if tokens is None or min(tokens) < 1:
            return False
        return not self.open or not self._plan(layer, tokens)

    def _plan(
        self, layer: int, tokens: Sequence[float], phase: Phase | None = None
    ) -> frozenset[int]:
        known = self._ahead.get(layer)
        if known is None or known[0] is not tokens:
            counts = [round(count) for count in tokens]
            phase = phase or self.course.next_phase(layer)
            before: frozenset[int] = frozenset()
            if phase is Phase.BACKWARD:  # the rows are sorted already
                before = self._forward.get(layer, before)
            known = tokens, self._settle(counts, self._present(layer), phase, before)
            self._ahead[layer] = known
        return known[1]

    def _choose(self, counts: Sequence[int], present: Present, phase: Phase) -> frozenset[int]:
        resident, uploaded = present
        return split(counts, resident, self._costs_of(phase), self.max_rows, uploaded)

    def note_gap(self, phase: Phase, seconds: float) -> None:
        """How long it was from the end of a layer's experts until the CPU had tokens of the next.
        All that lies between two layers is in it, and while it lasts only uploads go on."""
        if self.costs is not None:
            # with more than that there is no share: how much more does not matter
            seconds = min(seconds, 2 * self.course.n_experts * self.costs.load)
        before = self._gaps.get(phase, 0.0)  # the first may be one in which kernels are compiled
        self._gaps[phase] = before + _LEARN * (seconds - before)

    def note_job(self, phase: Phase, tokens: Sequence[int], seconds: float) -> None:
        """How long the CPU took for experts with so many tokens, gradients of weights not among it.
        What was measured at the beginning holds for cores that nobody else wants; here is what they
        give now."""
        if self.costs is None:
            return
        expected = sum(map(self._measured(phase).cpu, tokens))
        pace = min(_SLOWEST, seconds / expected)
        before = self._paces.get(phase, 1.0)
        self._paces[phase] = before + _LEARN * (pace - before)

    def note_handover(self, seconds: float) -> None:
        """The way to the CPU and back, if not more: the least of late is believed."""
        if self.costs is None:
            return
        known = self.costs.round_trip if self._handover is None else self._handover
        self._handover = min(self.costs.round_trip, _RISE * known, max(_LEAST, seconds))

    def _forget(self, phase: Phase) -> None:
        if phase in self._gaps:
            self._gaps[phase] *= _FORGET
        if phase in self._paces:
            self._paces[phase] += (1 - _FORGET) * (1 - self._paces[phase])

    def _costs_of(self, phase: Phase) -> SplitCosts:
        assert self.costs is not None
        known, pace = self._measured(phase), self._paces.get(phase, 1.0)
        handover = self.costs.round_trip if self._handover is None else self._handover
        return replace(
            known,
            cpu=lambda tokens: pace * known.cpu(tokens),
            fixed=handover + self._gaps.get(phase, 0.0),
        )

    def _measured(self, phase: Phase) -> SplitCosts:
        known = self._costs.get(phase)
        if known is None:
            known = self._costs[phase] = self._split_costs(phase)
        return known

    def _split_costs(self, phase: Phase) -> SplitCosts:
        assert self.costs is not None
        own = self.costs
        cpu, gpu = own.cpu_forward, own.gpu_forward
        if phase is Phase.BACKWARD:
            cpu, gpu = own.cpu_backward, own.gpu_backward

        # asked for the same few numbers again and again, in a hurry
        @functools.lru_cache(_KNOWN)
        def cpu_beside(tokens: int) -> float:
            return own.cpu_beside * cpu(tokens)

        times = functools.lru_cache(_KNOWN)(gpu)
        return SplitCosts(own.load, own.load_beside, cpu_beside, times, fixed=0.0)
