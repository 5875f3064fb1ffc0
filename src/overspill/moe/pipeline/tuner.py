"""The number of partitions of each pass, the same on all ranks.

Ranks tell each other the token rows of every expert once for each pass. The same message carries
the number of tokens and the time of the last measured pass, so that all search with equal numbers.
"""

import itertools
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overspill.core.errors import ConfigError, RankError
from overspill.core.expert_map import ExpertMap
from overspill.moe.autograd_state import graph_task
from overspill.moe.pipeline.arguments import DTYPES
from overspill.moe.pipeline.link import waiting
from overspill.moe.pipeline.rows import (
    DividedRows,
    Division,
    SortedRows,
    divide_rows,
    key_counts,
)
from overspill.parallel.exchange.interface import Exchange
from overspill.plan.granularity import CANDIDATES, GranularitySearch
from overspill.transfer.streams import HostCopy, Timestamp

_HEAD = 6
"""Numbers before the counts: tokens, training, data type; batch and partitions of the last measured
pass, and its nanoseconds."""
_KEPT = 8
"""So many measured passes wait to be reported: more than one if batches of two sizes alternate."""
_NOTHING = (0, 0, 0)
"""Instead of a report."""
_REFUSED = -1  # instead of a number of tokens
Numbers = NDArray[np.int64]


class PassTimer:
    """The time of one forward and its backward on the compute stream."""

    def __init__(
        self, device: torch.device, batch: int, n: int, ended: "Callable[[PassTimer], None]"
    ) -> None:
        self.batch, self.n = batch, n
        self._device, self._ended = device, ended
        self._stamps: list[Timestamp] = []

    def begin_forward(self) -> None:
        self._stamps = [Timestamp(self._device)]

    def end_forward(self) -> None:
        self._stamps.append(Timestamp(self._device))

    def begin_backward(self) -> None:
        del self._stamps[2:]  # of another backward through the same graph
        self._stamps.append(Timestamp(self._device))

    def end_backward(self) -> None:
        self._stamps.append(Timestamp(self._device))
        self._ended(self)

    def seconds(self) -> float | None:
        """The measured time; None if the device has not reached the end, or if a second backward
        has failed."""
        if len(self._stamps) < 4 or not self._stamps[-1].passed():
            return None
        begin, end, begin_backward, end_backward = self._stamps
        return begin.seconds_until(end) + begin_backward.seconds_until(end_backward)


class Tuner:
    """Chooses the number of partitions: a fixed one, or by search."""

    def __init__(self, partitions: int | None, even: bool = True) -> None:
        self.partitions = partitions
        self._even = even
        self.search = GranularitySearch()
        self._measured: deque[PassTimer] = deque(maxlen=_KEPT)  # not reported yet
        self._last: dict[int, int] = {}  # the number of partitions, by tokens of the largest rank

    def route(
        self,
        expert_ids_TK: Tensor,
        experts: ExpertMap,
        exchange: Exchange,
        training: bool,
        dtype: torch.dtype,
    ) -> tuple[DividedRows, PassTimer | None]:
        """The partitions of a pass, and what measures it. Must be called on all ranks; waits for
        the device. Raises on all if one has refused its input, or if ranks would wait for each
        other later."""
        n_tokens, n_experts, device = len(expert_ids_TK), experts.n_global, expert_ids_TK.device
        known = self._known(n_tokens, exchange)
        # rows are counted in the partitions of all candidates, if the number is not known
        divisions = {n: Division(n, self._even) for n in self._counted(known)}
        keys = {n: division.keys(expert_ids_TK, n_experts) for n, division in divisions.items()}
        counted = [key_counts(keys_TK, n * n_experts) for n, keys_TK in keys.items()]
        counts_R = HostCopy(counted[0] if len(counted) == 1 else torch.cat(counted))
        # queued before the host waits: the device sorts while the host computes
        rows = SortedRows.sort(keys[known], divisions[known]) if known else None
        counts = counts_R.wait()
        # now the device has come to the end of the pass before
        report = self._report() if known is None else _NOTHING
        head = [n_tokens, int(training), DTYPES.index(dtype), *report]
        found = _gather(head, counts, exchange)
        _check_heads(found[:, :3])
        batch, n = (n_tokens, known) if known else self._choose(found[:, :_HEAD])
        if rows is None:
            rows = SortedRows.sort(keys[n], divisions[n])
        first = _HEAD + n_experts * sum(itertools.takewhile(lambda each: each != n, keys))
        counts_GPE = found[:, first : first + n * n_experts].reshape(len(found), n, n_experts)
        routed = divide_rows(rows, counts_GPE, experts, exchange)
        if known or not training or self.search.settled(batch) is not None:
            return routed, None
        return routed, PassTimer(device, batch, n, self._end)

    def _counted(self, known: int | None) -> tuple[int, ...]:
        """Numbers of partitions whose rows are counted."""
        return CANDIDATES if known is None else (known,)

    def _known(self, n_tokens: int, exchange: Exchange) -> int | None:
        """The number of partitions if it is known before the rows are counted and, with several
        ranks, before these have told each other their tokens."""
        if self.partitions is not None or exchange.size > 1 or graph_task() != -1:
            return self.partitions
        n = self.search.settled(n_tokens)
        if n is not None:
            self._last[n_tokens] = n
        return n

    def _end(self, timer: PassTimer) -> None:
        if timer not in self._measured:  # else a second backward through the same graph
            self._measured.append(timer)

    def tell_failure(self, n_experts: int, exchange: Exchange) -> None:
        """Make the other ranks raise. Called in place of `route`."""
        head = [_REFUSED, *[0] * (_HEAD - 1)]
        size = n_experts * sum(self._counted(self.partitions))
        _gather(head, torch.zeros(size, dtype=torch.int64), exchange)

    def _report(self) -> tuple[int, int, int]:
        """The next measured pass, once: its batch, its partitions and its nanoseconds, or zeros."""
        if not self._measured or graph_task() != -1:
            return _NOTHING
        timer = self._measured.popleft()
        seconds = timer.seconds()
        return _NOTHING if seconds is None else (timer.batch, timer.n, round(seconds * 1e9))

    def _choose(self, heads: Numbers) -> tuple[int, int]:
        """The batch, and the number of partitions for it; from the same numbers on all ranks."""
        batch, _, _, measured, n, nanoseconds = heads.max(0).tolist()
        if n > 0 and (heads[:, 3:5] == (measured, n)).all():
            self.search.report(measured, n, nanoseconds / 1e9)
        if graph_task() != -1 and batch in self._last:  # a checkpoint repeats its forward
            return batch, self._last[batch]
        training = (heads[:, 1] > 0).all()
        n = self.search.choose(batch) if training else self.search.guess(batch)
        self._last[batch] = n
        return batch, n

    def __getstate__(self) -> dict[str, object]:
        """The state without measured passes, whose events belong to this process."""
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
