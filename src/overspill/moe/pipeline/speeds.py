"""Measures the speeds on which the choice of a memory reusing strategy depends
(`plan.reuse.Speeds`)."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.compute.experts import wave_forward
from overspill.moe.pipeline.activations import HostCopies
from overspill.moe.pipeline.experts import Experts
from overspill.parallel.exchange.interface import Exchange, LocalExchange
from overspill.plan.reuse import Speeds
from overspill.transfer.streams import Timestamp
from overspill.transfer.work_stream import Arrival

_ROWS = 8192
_ROUNDS = 3
_LONG = 2e-3
"""Seconds that measured work takes at least, repeated if need be: the host takes a tenth of a
millisecond to queue the first one, in which the device waits."""
_REPEATED = 8  # at most
_BESIDE = 64  # times that other work is repeated, at most
Begin = Callable[[], Sequence[Arrival]]
"""Queues some work; returns the transfers to wait for."""


@torch.no_grad()
def measure_speeds(experts: Experts, exchange: Exchange, copies: HostCopies) -> Speeds:
    """Take some hundredths of a second. Must be called on all ranks; the slowest counts."""
    weights, shape = experts.weights, experts.shape
    n_local = len(weights.w_in)
    x_RD = torch.randn(_ROWS, shape.d_model, device=exchange.device).to(weights.w_in.dtype)
    counts = [_ROWS * (e + 1) // n_local - _ROWS * e // n_local for e in range(n_local)]
    ends = torch.tensor([*itertools.accumulate(counts)], dtype=torch.int32, device=exchange.device)
    size = exchange.size
    rows = [_ROWS * (rank + 1) // size - _ROWS * rank // size for rank in range(size)]
    received = [rows[exchange.rank]] * size

    def compute() -> Sequence[Arrival]:
        wave_forward(x_RD, weights, shape, ends, counts, experts.activation)
        return ()

    def send() -> Sequence[Arrival]:
        return [exchange.send(x_RD, rows, received, "measured")]

    def copy() -> Sequence[Arrival]:
        return [copies.to_host(x_RD, "measured")]

    computing, sending, copying = (_repeated(work, exchange) for work in (compute, send, copy))
    flops = 2 * _ROWS * (shape.in_numel + shape.out_numel)
    local = isinstance(exchange, LocalExchange)
    return Speeds(
        flops / computing.each,
        float("inf") if local else x_RD.nbytes / sending.each,
        x_RD.nbytes / copying.each,
        1.0 if local else _beside(sending, [computing], exchange),
        1.0 if local else _beside(sending, [copying, computing], exchange),
        _beside(copying, [sending, computing], exchange),
    )


class _Repeated(NamedTuple):
    """Work that was measured some times in a row."""

    begin: Begin
    times: int
    seconds: float

    @property
    def each(self) -> float:
        return self.seconds / self.times


def _repeated(work: Begin, exchange: Exchange) -> _Repeated:
    times = min(_REPEATED, math.ceil(_LONG / _seconds([work], exchange)))
    return _Repeated(work, times, _seconds([work] * times, exchange))


def _beside(measured: _Repeated, others: Sequence[_Repeated], exchange: Exchange) -> float:
    """The speed of some work as a share of its speed alone. The other work takes no longer."""
    works = [measured.begin] * measured.times
    for other in others:
        works += [other.begin] * min(_BESIDE, int(measured.seconds / other.each))
    return min(1.0, measured.seconds / _seconds(works, exchange))


def _seconds(works: Sequence[Begin], exchange: Exchange) -> float:
    """Until all of them have ended, on the slowest rank; the median of some rounds."""
    found = []
    for _ in range(_ROUNDS + 1):  # the first one compiles kernels and allocates memory
        begin = Timestamp(exchange.device)
        arrivals = [arrival for work in works for arrival in work()]
        for arrival in arrivals:
            arrival.wait()
        end = Timestamp(exchange.device)
        if exchange.device.type == "cuda":
            torch.cuda.synchronize(exchange.device)
        found.append(begin.seconds_until(end))
    median = round(max(1e-9, statistics.median(found[1:])) * 1e12)
    slowest: Tensor = exchange.gather_numbers(torch.tensor([median])).max()
    return int(slowest) / 1e12
