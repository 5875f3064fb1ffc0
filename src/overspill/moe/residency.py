"""Keeps as many resident experts as its memory allows.

How much memory activations need is known only after a batch. So the first passes are observed, then
experts move to the device until the budget is used. Some leave it again before a larger batch, if
the allocator runs short, and if another model or process gets memory of the device.
"""

import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from overspill.core.errors import BudgetError, DiskError
from overspill.core.sizes import format_size
from overspill.moe.device_memory import DeviceMemory
from overspill.plan.residents import DeviceShare, share_memory

_log = logging.getLogger("overspill")
# Passes before a change. The first is not measured; in each of the next few the allocator divides
# its memory in other ways, and needs a little more.
_OBSERVED = 4
_SLACK = 0.05  # of activations, for the same reason
_MARGIN = 0.02  # share of the budget that stays free
_MARGIN_STEP = 0.01  # more of it after each shortage
_LARGEST_MARGIN = 0.16
_WORTHWHILE = 0.02  # share of the experts: moving fewer is not worth the wait


class BytesEach(NamedTuple):
    """Memory of the device that one of each needs; 0 if there are none."""

    expert: int  # resident
    gradient: int = 0  # an accumulated one
    kept: int = 0  # a kept gradient that can also be in host memory


class MovableExperts(Protocol):
    """The experts of a model as far as they can be on the device."""

    @property
    def total(self) -> int:
        """The number of experts."""

    @property
    def share(self) -> DeviceShare:
        """Experts and gradients on the device."""

    def set_share(self, share: DeviceShare) -> None:
        """Move experts and gradients, between steps."""

    def bytes_each(self) -> BytesEach:
        """Bytes that each of them needs on the device now."""

    @property
    def most_sums(self) -> int:
        """The most gradients that are accumulated at a time."""


@dataclass
class _Observed:
    """The memory of passes of one kind, with or without gradients."""

    rows: int = 0  # the most tokens of a pass that was measured
    bytes: int = 0  # its activations
    most_rows: int = 0  # the most tokens of any pass

    def need(self) -> float:
        if not self.rows:
            return 0.0
        return (1 + _SLACK) * self.bytes * max(1.0, self.most_rows / self.rows)


class Residency:
    """Decides on the number of resident experts before each pass through the model."""

    def __init__(
        self, memory: DeviceMemory, budget: int, experts: MovableExperts, planned_bytes: int = 0
    ) -> None:
        """The plan of memory counts `planned_bytes` for each expert that is resident now."""
        self._memory = memory
        self._budget = budget
        self._limit = budget  # of the last pass: what of the budget is available
        self._experts = experts
        self._margin = _MARGIN
        self._planned_bytes = max(planned_bytes, experts.bytes_each().expert)  # for each resident
        self._at_first = experts.share.experts
        self._passes = 0  # since experts were moved
        self._idle = 0  # bytes in use before a pass
        self._activations = 0  # the most beside them since experts were moved
        self._rows: dict[bool, int] = {}  # the most tokens of a pass since experts were moved
        self._observed: dict[bool, _Observed] = {}
        self._shortages = memory.shortages()
        memory.reset()

    def before_pass(self, rows: int, training: bool) -> None:
        """A pass of `rows` tokens begins, between two steps: moves experts if that is worthwhile.
        Experts that cannot leave the device stay there."""
        self.reserve(self._experts.bytes_each().expert)
        if self._passes == 1:  # the first pass may have compiled kernels and allocated states
            self._memory.reset()
            self._rows.clear()
            self._activations = 0
        elif self._passes > 1:
            self._activations = max(self._activations, self._memory.peak() - self._idle)
            self._observe(self._activations)
        kind = self._observed.setdefault(training, _Observed())
        larger = rows > kind.most_rows
        kind.most_rows = max(kind.most_rows, rows)
        self._adjust(larger)
        self._rows[training] = max(rows, self._rows.get(training, 0))
        self._passes += 1
        self._idle = self._memory.allocated()

    def shrink(self) -> None:
        """Move experts that are too many away, for another model."""
        self._adjust(larger=True, fill=False)

    def _observe(self, activations: int) -> None:
        """No pass since the last change has needed more than `activations`."""
        for training, rows in self._rows.items():
            kind = self._observed[training]
            if rows > kind.rows:
                kind.rows, kind.bytes = rows, activations
            elif rows == kind.rows and len(self._rows) == 1:
                kind.bytes = max(kind.bytes, activations)

    def _adjust(self, larger: bool, fill: bool = True) -> None:
        """`larger`: more memory is needed, as for a pass of its kind with the most tokens so far.
        Without `fill` no expert moves to the device."""
        now, shortages = self._experts.share, self._memory.shortages()
        short, self._shortages = shortages > self._shortages and any(now), shortages
        if short:
            self._margin = min(_LARGEST_MARGIN, self._margin + _MARGIN_STEP)
        available = min(self._budget, self._memory.available())
        taken = available < self._limit * (1 - self._margin)  # by another model or process
        self._limit = available if taken else max(available, self._limit)
        limit = available * (1 - self._margin)
        activations = max((kind.need() for kind in self._observed.values()), default=0)
        need = self._memory.allocated() + activations
        each, total = self._experts.bytes_each(), self._experts.total
        free, sums = int(limit - need), self._experts.most_sums
        share = share_memory(free, now, each.expert, total, each.gradient, each.kept, sums)
        if not fill:
            share = DeviceShare(min(now.experts, share.experts), share.gradients)
        if limit < need and (short or taken or larger):
            if taken:
                left = format_size(max(0, available))
                _log.warning("the GPU has only %s left for this model: experts leave it", left)
            if share != now:
                self._move(share)
        elif fill and limit > need and self._passes >= _OBSERVED and self._worthwhile(now, share):
            self._planned_bytes = each.expert
            self._move(share)

    def _worthwhile(self, now: DeviceShare, share: DeviceShare) -> bool:
        total = self._experts.total
        least = max(1, int(_WORTHWHILE * total))
        last = share.experts == total and now.experts < total
        return last or any(abs(a - b) >= least for a, b in zip(now, share, strict=True))

    def reserve(self, expert_bytes: int) -> None:
        """Each resident expert will need `expert_bytes`: if that is more than before, some leave
        the device first."""
        if expert_bytes > self._planned_bytes:
            now = self._experts.share
            remaining = now.experts * self._planned_bytes // expert_bytes
            self._planned_bytes = expert_bytes
            self._passes = 0
            if remaining < now.experts:
                self._move(DeviceShare(remaining))

    def begin_again(self) -> None:
        """Begin to observe anew, because the next passes need other memory, as with an optimizer
        that clips and one that does not: experts return to their first number."""
        self._observed.clear()
        self._passes = 0
        if self._experts.share.experts > self._at_first:
            self._move(DeviceShare(self._at_first))

    def _move(self, share: DeviceShare) -> None:
        before = self._experts.share
        try:
            self._experts.set_share(share)
        except DiskError:
            self._passes = 0  # until it is tried again
            raise
        except BudgetError as error:
            _log.warning("experts could not leave the GPU: %s", error)
        except torch.OutOfMemoryError:  # memory is divided into pieces that are too small
            self._margin = min(_LARGEST_MARGIN, self._margin + _MARGIN_STEP)
            self._memory.reset()
            self._experts.set_share(DeviceShare(min(before.experts, share.experts)))
            _log.info("fewer experts than planned fit on the GPU")
        else:
            moved = share.experts - before.experts
            size = format_size(abs(moved) * self._experts.bytes_each().expert)
            if moved:
                verb = "moved to" if moved > 0 else "left"
                _log.info("%d experts (%s) %s the GPU", abs(moved), size, verb)
        self._memory.reset()
        self._passes = self._activations = 0
        self._rows.clear()
