"""The order of a pipelined pass, forward and backward alike: over partitions of the tokens, or over
groups of streamed experts (`moe.exchanged_pass`, where groups share whole tensors).

S sends the rows of a partition to the ranks that compute them, C computes, R returns the results.
The exchange carries out S0 S1 R0 S2 R1 S3 R2 …, the compute stream

    gather 0, gather 1, C0, gather 2, C1, gather 3, finish 0, C2, …

where "gather" makes the rows of S and "finish" uses those of R. Two partitions are under way at any
time. No tensor is overwritten while it is in use:

| memory            | written again by | after the last read by                                    |
|-------------------|------------------|-----------------------------------------------------------|
| rows of S(i)      | gather i+2       | S(i): compute waits for it before C(i)                    |
| T_DI, result of S | S(i+2)           | C(i): S(i+2) waits for gather i+2, which is queued later  |
| T_M               | C(i+1)           | C(i): same stream. If T_M is copied to the host: C(i+2),  |
|                   |                  | and compute waits for the copy of i before C(i+2)         |
| T_DO, rows of R   | C(i+2)           | R(i): compute waits for it before finish i                |
| result of R(i)    | R(i+2)           | finish i: R(i+2) waits for C(i+2), which is queued later  |

The memory is that of torch's allocator: a tensor returns to it when the compute stream has waited
for the streams that use it (`Arrival`), so layers and partitions share it.
"""

from collections.abc import Callable

from torch import Tensor

from overspill.transfer.work_stream import Arrival

AHEAD = 2
"""Partitions under way."""


Send = Callable[[int, list[Arrival]], None]
"""Queues S of a partition and adds the rows that it brings to the list."""
Compute = Callable[[int, list[Tensor], list[Arrival]], None]
"""Queues C and R of a partition, given the rows of S, and adds the rows that R brings to the last
list. The list of given rows is emptied, so that their memory is free as early as possible."""
Finish = Callable[[int, list[Tensor]], None]
"""Uses the rows of R of a partition."""


def run_pipeline(
    n: int, send: Send, compute: Compute, finish: Finish = lambda number, rows: None
) -> None:
    """Run the steps of n partitions. They add transfers to the lists as soon as these have begun:
    after a failure, the compute stream waits for all of them."""
    sent: list[list[Arrival]] = [[] for _ in range(n)]
    returned: list[list[Arrival]] = [[] for _ in range(n)]
    try:
        for number in range(min(AHEAD, n)):
            send(number, sent[number])
        for number in range(n):
            if number >= AHEAD:
                finish(number - AHEAD, _waited(returned[number - AHEAD]))
            compute(number, _waited(sent[number]), returned[number])
            if number + AHEAD < n:
                send(number + AHEAD, sent[number + AHEAD])
        for number in range(max(0, n - AHEAD), n):
            finish(number, _waited(returned[number]))
    finally:
        for arrivals in (*sent, *returned):
            _waited(arrivals)


def _waited(arrivals: list[Arrival]) -> list[Tensor]:
    """Let the compute stream wait for transfers; return their rows. Empties the list: the memory is
    not held here."""
    rows = [arrival.wait() for arrival in arrivals]
    arrivals.clear()
    return rows
