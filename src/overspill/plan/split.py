"""The split of a layer's experts: the CPU computes some in host memory, the others go to the GPU.

Equation 1 of APTMoE: experts are ranked by their tokens; the CPU takes them from the low end while
its time stays below the time that uploading the others takes. Here every cost is measured, and the
cut is where the slowest resource finishes earliest.

Three resources work in parallel: the link with uploads, the GPU with its experts, the cores with
theirs.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

_WORTH = 0.91
"""A split must take at most this share of the time without one: a smaller gain is within the error
of the estimate."""


@dataclass(frozen=True)
class SplitCosts:
    """Seconds, for one pass through one layer in one direction."""

    load: float
    """Upload of one expert while the CPU is idle."""
    load_beside: float
    """Upload of one expert while the CPU computes."""
    cpu: Callable[[int], float]
    """One expert with this many tokens on the CPU, during uploads."""
    gpu: Callable[[int], float]
    fixed: float
    """Handing tokens to the CPU and their results back."""


def pass_time(
    tokens: Sequence[int], resident: Collection[int], on_cpu: Collection[int], costs: SplitCosts
) -> float:
    """Seconds that the busiest resource works if the CPU computes the experts `on_cpu`. All others
    that are not `resident` are uploaded for this pass."""
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
    """The experts that the CPU computes. `tokens` are the tokens of each expert. `resident` experts
    need no upload. Experts `uploaded` ahead for this pass stay on the device, and count for the
    link, which will upload as many for the next layer meanwhile. `max_rows` bounds the tokens of
    the CPU."""
    nothing: frozenset[int] = frozenset()
    every = [index for index, count in enumerate(tokens) if count]
    absent = [i for i in every if i not in resident and i not in uploaded]
    sums = _Sums(tokens, resident, costs)
    uploads, gpu = costs.load * sums.uploads, sums.gpu
    idle = max(uploads, gpu)
    if costs.fixed >= _WORTH * idle:
        return nothing
    ranked = sorted(absent, key=lambda index: (tokens[index], index))
    found, seconds = _cut(sums, ranked, max_rows)
    if gpu >= uploads:
        # the GPU is the slowest: resident experts may move too, and a few large experts may use
        # the time better than many small ones
        movable = [index for index in every if index not in uploaded]
        largest = sorted(movable, key=lambda index: (-tokens[index], index))
        for order in (largest[::-1], largest):
            other, time = _pick(_Sums(tokens, resident, costs), order, max_rows, idle)
            if time < seconds:
                found, seconds = other, time
    return found if seconds < _WORTH * idle else nothing


class _Sums:
    """The work of each resource, as experts move to the CPU one by one."""

    def __init__(self, tokens: Sequence[int], resident: Collection[int], costs: SplitCosts) -> None:
        self.tokens, self.resident, self.load = tokens, resident, costs.load_beside
        # computed once: a pass has few different counts, and the GPU waits for the plan
        self.times = {count: (costs.cpu(count), costs.gpu(count)) for count in set(tokens)}
        self.uploads = sum(bool(n) and i not in resident for i, n in enumerate(tokens))
        self.gpu = sum(self.times[count][1] for count in tokens if count)
        self.cpu = costs.fixed
        self.rows = 0

    def move(self, index: int, sign: int = 1) -> None:
        """The expert goes to the CPU, or with sign -1 back."""
        count = self.tokens[index]
        cpu, gpu = self.times[count]
        self.rows += sign * count
        self.cpu += sign * cpu
        self.gpu -= sign * gpu
        self.uploads -= sign * (index not in self.resident)

    @property
    def seconds(self) -> float:
        return max(self.cpu, self.load * self.uploads, self.gpu)


def _cut(sums: _Sums, ranked: Sequence[int], max_rows: int | None) -> tuple[frozenset[int], float]:
    """The best cut through the experts from the lowest rank on, and the time it gives."""
    best, best_time = 0, float("inf")
    for number, index in enumerate(ranked, start=1):
        sums.move(index)
        seconds = sums.seconds
        if max_rows is not None and sums.rows > max_rows:
            break
        if seconds < best_time:
            best, best_time = number, seconds
        if sums.cpu >= best_time:
            break  # the CPU time only grows
    return frozenset(ranked[:best]), best_time


def _pick(
    sums: _Sums,
    order: Sequence[int],
    max_rows: int | None,
    best_time: float,
) -> tuple[frozenset[int], float]:
    """Take each expert in turn if that makes the pass faster than `best_time` and than before."""
    taken: set[int] = set()
    for index in order:
        sums.move(index)
        fits = max_rows is None or sums.rows <= max_rows
        if fits and sums.seconds < best_time:
            taken.add(index)
            best_time = sums.seconds
        else:
            sums.move(index, -1)
    return frozenset(taken), best_time
