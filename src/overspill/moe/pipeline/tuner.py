"""The number of partitions of each pass, the same on all ranks.

Ranks tell each other the token rows of every expert once for each pass. The same message carries
the number of tokens and the time of the last measured pass, so that all search with equal numbers.
"""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overspill.core.errors import ConfigError, RankError
from overspill.core.expert_map import ExpertMap
from overspill.moe.autograd_state import graph_task
from overspill.moe.device_memory import allocation_calls
from overspill.moe.pipeline.arguments import DTYPES
from overspill.moe.pipeline.link import waiting
from overspill.moe.pipeline.rows import (
    Division,
    RoutedRows,
    SortedRows,
    divide_rows,
    key_counts,
)
from overspill.parallel.exchange.interface import Exchange
from overspill.plan.granularity import GranularitySearch, PassTime
from overspill.transfer.streams import HostCopy, Timestamp

_HEAD = 9
"""Numbers before the counts: tokens, training, data type; batch and partitions of the last measured
pass, and its times in nanoseconds, in the order of `PassTime`."""
_ALLOCATING = 2
"""So many passes with a number of partitions may get memory from the system and are not counted."""
_KEPT = 8
"""So many measured passes wait to be reported: more than one if batches of two sizes alternate."""
_NOTHING = (0,) * 6
"""Instead of a report."""
_REFUSED = -1  # instead of a number of tokens
Numbers = NDArray[np.int64]
Allocations = Callable[[torch.device], int]
"""Counts the calls that have got memory from the system."""


class PassTimer:
    """The time of one forward and its backward, on the compute stream and of the host. A pass that
    has got memory from the system, which takes milliseconds, says nothing about the next ones."""

    def __init__(
        self,
        device: torch.device,
        batch: int,
        n: int,
        began: Timestamp,
        routing: float,
        ended: "Callable[[PassTimer], None]",
        allocations: Allocations,
    ) -> None:
        """`began`: when the device could begin with routing the rows. `routing`: seconds of the
        host for that, without those in which it has waited."""
        self.batch, self.n, self._began = batch, n, began
        self._device, self._ended, self._count = device, ended, allocations
        self._routing = routing
        self._stamps: list[Timestamp] = []
        self._allocations = allocations(device)
        self.allocated = False
        self.followed: float | None = None
        """When the next pass has begun on the host."""

    def begin_forward(self) -> None:
        self._stamps = [Timestamp(self._device)]

    def end_forward(self) -> None:
        self._stamps.append(Timestamp(self._device))

    def begin_backward(self) -> None:
        del self._stamps[2:]  # of another backward through the same graph
        self._stamps.append(Timestamp(self._device))

    def end_backward(self) -> None:
        self._stamps.append(Timestamp(self._device))
        self.allocated = self._count(self._device) > self._allocations
        self._ended(self)

    def wait(self) -> None:
        """Until the device has come to the end of the pass."""
        self._stamps[-1].wait()

    def passed(self) -> bool:
        """Whether the device has come to the end of the pass."""
        return self._stamps[-1].passed()

    def found(self) -> PassTime | None:
        """None if the device has not come so far, or if a second backward has failed."""
        if len(self._stamps) < 4 or not self.passed():
            return None
        begin, end, begin_backward, end_backward = self._stamps
        seconds = begin.seconds_until(end) + begin_backward.seconds_until(end_backward)
        if self._device.type == "cpu":
            return PassTime(seconds)
        queueing = end.made - begin.made + end_backward.made - begin_backward.made
        step = begin.seconds_until(end_backward)
        if self.followed is not None:
            step = max(step, self.followed - begin.made)
        step += self._began.seconds_until(begin)  # in which the device may wait for the host
        return PassTime(seconds, self._routing + queueing, queueing, step)


class Tuner:
    """Chooses the number of partitions: a fixed one, or by search."""

    def __init__(
        self,
        partitions: int | None,
        even: bool = True,
        allocations: Allocations = allocation_calls,
    ) -> None:
        self.partitions = partitions
        self._even = even
        self._count_allocations = allocations
        self.search = GranularitySearch()
        self._measured: deque[PassTimer] = deque(maxlen=_KEPT)  # not reported yet
        self._allocating: Counter[tuple[int, int]] = Counter()  # passes, by batch and partitions
        self._last: dict[int, int] = {}  # the number of partitions, by tokens of the largest rank

    def route(
        self,
        expert_ids_TK: Tensor,
        experts: ExpertMap,
        exchange: Exchange,
        training: bool,
        dtype: torch.dtype,
    ) -> tuple[RoutedRows, PassTimer | None]:
        """The partitions of a pass, and what measures it. Must be called on all ranks; waits for
        the device. Raises on all if one has refused its input, or if ranks would wait for each
        other later."""
        start = time.perf_counter()
        n_tokens, n_experts, device = len(expert_ids_TK), experts.n_global, expert_ids_TK.device
        began = Timestamp(device) if training and not self._is_settled(n_tokens, exchange) else None
        for timer in self._measured:
            timer.followed = timer.followed or start
        known = self._known(n_tokens, exchange, training)
        ready = time.perf_counter()
        # rows are counted in the partitions of all candidates, if the number is not known
        divisions = {n: Division(n, self._even) for n in self._counted(known)}
        keys = {n: division.keys(expert_ids_TK, n_experts) for n, division in divisions.items()}
        counted = [key_counts(keys_TK, n * n_experts) for n, keys_TK in keys.items()]
        counts_R = HostCopy(counted[0] if len(counted) == 1 else torch.cat(counted))
        # queued before the host waits: the device sorts while the host computes
        rows = SortedRows.sort(keys[known], divisions[known]) if known else None
        queued = time.perf_counter()
        counts = counts_R.wait()
        # now the device has come to the end of the pass before
        report = self._report() if known is None else _NOTHING
        head = [n_tokens, int(training), DTYPES.index(dtype), *report]
        found = _gather(head, counts, exchange)
        told = time.perf_counter()
        _check_heads(found[:, :3])
        batch, n = n_tokens, known
        if n is None:
            batch, n = self._choose(found[:, :_HEAD])
        if rows is None:
            rows = SortedRows.sort(keys[n], divisions[n])
        first = _HEAD + n_experts * sum(itertools.takewhile(lambda each: each != n, keys))
        counts_GPE = found[:, first : first + n * n_experts].reshape(len(found), n, n_experts)
        routed = divide_rows(rows, counts_GPE, experts, exchange)
        if began is None or self.search.settled(batch) is not None:
            return routed, None
        host = queued - ready + time.perf_counter() - told
        return routed, PassTimer(device, batch, n, began, host, self._end, self._count_allocations)

    def _is_settled(self, n_tokens: int, exchange: Exchange) -> bool:
        """Whether it is known that no trial is needed."""
        if self.partitions is not None:
            return True
        return exchange.size == 1 and self.search.settled(n_tokens) is not None

    def _counted(self, known: int | None) -> tuple[int, ...]:
        """Numbers of partitions whose rows are counted."""
        return self.search.candidates if known is None else (known,)

    def _known(self, n_tokens: int, exchange: Exchange, training: bool) -> int | None:
        """The number of partitions if it is known before the rows are counted and, with several
        ranks, before these have told each other their tokens."""
        if self.partitions is not None or exchange.size > 1 or graph_task() != -1:
            return self.partitions
        n = self.search.settled(n_tokens)
        if n is None and training:
            if self._measured and self.search.depends_on_report(n_tokens):
                self._measured[-1].wait()  # else rows would be counted for all numbers
            while self._measured and self._measured[0].passed():
                self._learn(*self._report())
            n = self.search.choose(n_tokens)
        if n is not None:
            self._last[n_tokens] = n
        return n

    def _learn(self, batch: int, n: int, *nanoseconds: int) -> None:
        if n > 0:  # else no pass was measured
            times = PassTime(*(each / 1e9 for each in nanoseconds)) if nanoseconds[0] > 0 else None
            self.search.report(batch, n, times)

    def _end(self, timer: PassTimer) -> None:
        if timer not in self._measured:  # else a second backward through the same graph
            self._measured.append(timer)

    def tell_failure(self, n_experts: int, exchange: Exchange) -> None:
        """In place of `route`: the other ranks raise."""
        head = [_REFUSED, *[0] * (_HEAD - 1)]
        size = n_experts * sum(self._counted(self.partitions))
        _gather(head, torch.zeros(size, dtype=torch.int64), exchange)

    def _report(self) -> tuple[int, ...]:
        """The next measured pass, once: its batch, its partitions and its times, or zeros."""
        if not self._measured or graph_task() != -1:
            return _NOTHING
        timer = self._measured.popleft()
        place = timer.batch, timer.n
        if timer.allocated and self._allocating[place] < _ALLOCATING:
            self._allocating[place] += 1
            return *place, *_NOTHING[2:]
        found = timer.found()
        if found is None:
            return *place, *_NOTHING[2:]
        times = found.device, found.host, found.partitions, found.step
        return *place, *(round(seconds * 1e9) for seconds in times)

    def _choose(self, heads: Numbers) -> tuple[int, int]:
        """The batch, and the number of partitions for it; from the same numbers on all ranks."""
        batch, _, _, measured, n, *nanoseconds = heads.max(0).tolist()
        if (heads[:, 3:5] == (measured, n)).all():
            counted = (heads[:, 5] > 0).all()
            self._learn(measured, n, *(nanoseconds if counted else [0]))
        if graph_task() != -1 and batch in self._last:  # a checkpoint repeats its forward
            return batch, self._last[batch]
        training = (heads[:, 1] > 0).all()
        n = self.search.choose(batch) if training else self.search.guess(batch)
        self._last[batch] = n
        return batch, n

    def __getstate__(self) -> dict[str, object]:
        """Without measured passes, whose events belong to this process."""
        return {**vars(self), "_measured": deque(maxlen=_KEPT)}


def _gather(head: list[int], counts: Tensor, exchange: Exchange) -> Numbers:
    """The numbers of all ranks."""
    message = torch.cat((torch.tensor(head), counts))
    with waiting(f"the forward of a MoELayer on rank {exchange.rank}"):
        found: Numbers = exchange.gather_numbers(message).numpy()
    return found


def _check_heads(heads: Numbers) -> None:
    """Tokens, training and data type of each rank."""
    refused = [rank for rank, tokens in enumerate(heads[:, 0].tolist()) if tokens == _REFUSED]
    if refused:
        raise RankError(
            f"rank {refused[0]} has refused the input of this MoELayer; its own error says why"
        )
    for rank, (_, training, dtype) in enumerate(heads.tolist()):
        if training != heads[0, 1]:
            raise ConfigError(
                "ranks must all train, or none, else some wait for a backward forever: "
                f"{'rank 0' if training else f'rank {rank}'} computes no gradients"
            )
        if dtype != heads[0, 2]:
            raise ConfigError(
                f"ranks must compute in the same data type: rank 0 in {DTYPES[heads[0, 2]]}, "
                f"rank {rank} in {DTYPES[dtype]}; use torch.autocast on all ranks or on none"
            )
