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

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from overspill.transfer.work_stream import Arrival

AHEAD = 2
"""Partitions under way."""


class Steps(Protocol):
    """What a pass does with one partition."""

    def send(self, number: int) -> Sequence[Arrival]:
        """Queues S; returns the rows that it brings."""

    def compute(self, number: int, rows: list[Tensor]) -> Sequence[Arrival]:
        """Queues C and R; returns the rows that R brings. `rows` are those of S; the list is
        emptied, so that their memory is free as early as possible."""

    def finish(self, number: int, rows: list[Tensor]) -> None:
        """Uses the rows of R."""


def run_pipeline(n: int, steps: Steps) -> None:
    """After a failure, the compute stream waits for what is under way."""
    sent: dict[int, Sequence[Arrival]] = {}
    returned: dict[int, Sequence[Arrival]] = {}

    def finish(number: int) -> None:
        rows = [arrival.wait() for arrival in returned[number]]
        del returned[number]
        steps.finish(number, rows)

    try:
        for number in range(min(AHEAD, n)):
            sent[number] = steps.send(number)
        for number in range(n):
            if number >= AHEAD:
                finish(number - AHEAD)
            rows = [arrival.wait() for arrival in sent[number]]
            del sent[number]
            returned[number] = steps.compute(number, rows)
            if number + AHEAD < n:
                sent[number + AHEAD] = steps.send(number + AHEAD)
        for number in sorted(returned):
            finish(number)
    finally:
        for arrivals in (*sent.values(), *returned.values()):
            for arrival in arrivals:
                arrival.wait()
