"""Splits the experts of a layer between CPU and GPU.

Equation 1 of APTMoE ranks experts by token count; the CPU takes them from the low end while its
time stays below the time to upload the others. Here every cost is measured, and the split minimizes
the time of the busiest resource. The resources (link, GPU, CPU cores) work in parallel.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

_MAX_SHARE = 0.91
"""A split must stay below this share of the time without it: a smaller gain is within the error."""


@dataclass(frozen=True)
class SplitCosts:
    """Seconds for one layer, forward or backward."""

    load: float
    """Upload of one expert while the CPU is idle."""
    load_beside: float
    """Upload of one expert while the CPU computes."""
    cpu: Callable[[int], float]
    """One expert on the CPU during uploads, by token count."""
    gpu: Callable[[int], float]
    """One expert on the GPU, by token count."""
    fixed: float
    """Transfer of tokens to the CPU and of the results back."""


def pass_time(
    tokens: Sequence[int], resident: Collection[int], on_cpu: Collection[int], costs: SplitCosts
) -> float:
    """Time of the busiest resource if the CPU computes the experts `on_cpu`. Others that are not
    `resident` are uploaded."""
    busy = [index for index, count in enumerate(tokens) if count]
    rest = [index for index in busy if index not in on_cpu]
    load = costs.load_beside if on_cpu else costs.load
    cpu = 0.0
    if on_cpu:
        cpu = costs.fixed + sum(costs.cpu(tokens[index]) for index in on_cpu)
    uploads = load * sum(index not in resident for index in rest)
    return max(cpu, uploads, sum(costs.gpu(tokens[index]) for index in rest))


def split(
    tokens: Sequence[int],
    resident: Collection[int],
    costs: SplitCosts,
    max_rows: int | None = None,
    uploaded: Collection[int] = (),
) -> frozenset[int]:
    """The experts that the CPU computes, given the `tokens` of each expert. `resident` experts need
    no upload. Experts already `uploaded` for this layer stay on the GPU but count for the link,
    which uploads as many for the next layer. The CPU takes at most `max_rows` tokens."""
    every = [index for index, count in enumerate(tokens) if count]
    absent = [i for i in every if i not in resident and i not in uploaded]
    work = _Work(tokens, resident, costs)
    uploads, gpu = costs.load * work.uploads, work.gpu
    idle = max(uploads, gpu)
    if costs.fixed >= _MAX_SHARE * idle:
        return frozenset()
    ranked = sorted(absent, key=lambda index: (tokens[index], index))
    found, seconds = _cut(work, ranked, max_rows)
    if gpu >= uploads:
        # the GPU is the slowest: resident experts can move too, and a few large experts may use the
        # time better than many small ones
        movable = [index for index in every if index not in uploaded]
        largest = sorted(movable, key=lambda index: (-tokens[index], index))
        for order in (largest[::-1], largest):
            other, time = _pick(_Work(tokens, resident, costs), order, max_rows, idle)
            if time < seconds:
                found, seconds = other, time
    return found if seconds < _MAX_SHARE * idle else frozenset()


class _Work:
    """The work of each resource while experts move to the CPU one by one."""

    def __init__(self, tokens: Sequence[int], resident: Collection[int], costs: SplitCosts) -> None:
        self.tokens, self.resident, self.load = tokens, resident, costs.load_beside
        # computed once per count: planning is time-critical, and counts repeat
        self.times = {count: (costs.cpu(count), costs.gpu(count)) for count in set(tokens)}
        self.uploads = sum(bool(n) and i not in resident for i, n in enumerate(tokens))
        self.gpu = sum(self.times[count][1] for count in tokens if count)
        self.cpu = costs.fixed
        self.rows = 0

    def move(self, index: int, sign: int = 1) -> None:
        """Moves an expert to the CPU, or back with sign -1."""
        count = self.tokens[index]
        cpu, gpu = self.times[count]
        self.rows += sign * count
        self.cpu += sign * cpu
        self.gpu -= sign * gpu
        self.uploads -= sign * (index not in self.resident)

    @property
    def seconds(self) -> float:
        return max(self.cpu, self.load * self.uploads, self.gpu)


def _cut(work: _Work, ranked: Sequence[int], max_rows: int | None) -> tuple[frozenset[int], float]:
    """The best prefix of the ranked experts for the CPU, and its time."""
    best, best_time = 0, float("inf")
    for number, index in enumerate(ranked, start=1):
        work.move(index)
        seconds = work.seconds
        if max_rows is not None and work.rows > max_rows:
            break
        if seconds < best_time:
            best, best_time = number, seconds
        if work.cpu >= best_time:
            break  # the CPU time only grows
    return frozenset(ranked[:best]), best_time


def _pick(
    work: _Work, order: Sequence[int], max_rows: int | None, best_time: float
) -> tuple[frozenset[int], float]:
    """Moves each expert in `order` to the CPU if that makes the layer faster."""
    taken: set[int] = set()
    for index in order:
        work.move(index)
        fits = max_rows is None or work.rows <= max_rows
        if fits and work.seconds < best_time:
            taken.add(index)
            best_time = work.seconds
        else:
            work.move(index, -1)
    return frozenset(taken), best_time
