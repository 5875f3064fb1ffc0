"""Measures what the choice of a memory reusing strategy depends on (`plan.reuse.Speeds`)."""

import itertools
import statistics
from collections.abc import Callable, Sequence

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
_MOST = 64  # times that work is repeated to take as long as the other
Begin = Callable[[], Sequence[Arrival]]
"""Queues some work; returns what must be waited for."""


@torch.no_grad()
def measure_speeds(experts: Experts, exchange: Exchange, copies: HostCopies) -> Speeds:
    """Takes some hundredths of a second. Must be called on all ranks; the slowest counts."""
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

    seconds = [_seconds([work], exchange) for work in (compute, send, copy)]
    computing, sending, copying = seconds
    beside_compute = _seconds([send, *_times(compute, sending / computing)], exchange)
    beside_all = _seconds(
        [send, *_times(copy, sending / copying), *_times(compute, sending / computing)], exchange
    )
    copy_beside = _seconds(
        [copy, *_times(send, copying / sending), *_times(compute, copying / computing)], exchange
    )
    flops = 2 * _ROWS * (shape.in_numel + shape.out_numel)
    local = isinstance(exchange, LocalExchange)
    return Speeds(
        flops / computing,
        float("inf") if local else x_RD.nbytes / sending,
        x_RD.nbytes / copying,
        1.0 if local else min(1.0, sending / beside_compute),
        1.0 if local else min(1.0, sending / beside_all),
        min(1.0, copying / copy_beside),
    )


def _times(work: Begin, ratio: float) -> list[Begin]:
    """As often as it takes no longer than the work that is measured."""
    return [work] * min(_MOST, int(ratio))


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
