"""The GPU that computes each token row of a layer, if several GPUs can upload every expert.

Static placement: each expert is computed by its owner. Dynamic placement (§4.2 of the ES-MoE paper)
is planned for each batch: experts in descending order of their token rows go to the GPU with the
least work so far. No such rule balances an expert that has more than its share of the rows:
here some of its rows go to other GPUs, each of which uploads the expert too.

Uploads of a GPU run beside its compute, so a GPU needs the longer of both. With dynamic placement
the first upload cannot begin before the routing is known; the paper's time of a GPU, the longest
upload plus all compute, is that of a GPU whose other uploads are hidden. Every rank computes the
same plan from the same counts.

A placement is an array of token rows, [G, E]. The rows of an expert go to GPUs in their order: its
first `rows_GE[0, e]` rows to GPU 0, the next to GPU 1, and so on.

Shapes: G GPUs, E experts of a layer.
"""

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overspill.core.expert_map import ExpertMap

Rows = NDArray[np.int64]

_CLOSE = 0.01
"""Share of the mean by which a GPU may have more token rows before an expert is split."""
_WORTH = 0.99
"""Another placement must take at most this share of the time."""


@dataclass(frozen=True)
class PlacementCosts:
    """Seconds, for one layer in all passes of a step."""

    upload: float
    """One expert to one GPU; in training in both passes."""
    row: float
    """Computing one token row."""
    wait: float = 0.0
    """Seconds that dynamic placement adds to a layer: the first upload, which waits for the
    routing."""

    def __post_init__(self) -> None:
        if not (self.upload >= 0 and self.row > 0 and self.wait >= 0):
            raise ValueError(f"costs must not be negative, and a row must cost something: {self}")


@functools.lru_cache(maxsize=8)
def owners(n_experts: int, n_gpus: int) -> Rows:
    """The GPU that owns each expert, [E]: adjacent experts, equally many for each GPU if possible.
    The array is shared and cannot be written to."""
    if n_gpus < 1:
        raise ValueError(f"n_gpus={n_gpus} must be at least 1")
    sizes = [ExpertMap.part(n_experts, gpu, n_gpus).n_local for gpu in range(n_gpus)]
    owners_E = np.repeat(np.arange(n_gpus, dtype=np.int64), sizes)
    owners_E.flags.writeable = False
    return owners_E


def static_rows(tokens: Sequence[int] | NDArray[Any], n_gpus: int) -> Rows:
    """All rows of an expert are computed by its owner. `tokens` are the token rows of each."""
    tokens_E = _counts(tokens)
    rows_GE = np.zeros((n_gpus, len(tokens_E)), np.int64)
    rows_GE[owners(len(tokens_E), n_gpus), np.arange(len(tokens_E))] = tokens_E
    return rows_GE


def dynamic_rows(
    tokens: Sequence[int] | NDArray[Any],
    n_gpus: int,
    costs: PlacementCosts,
    resident: bool = False,
) -> Rows:
    """The placement for these token rows: the static one where no other is faster. If experts are
    `resident` on their owners, the owners upload nothing, and experts are only split."""
    static_GE = static_rows(tokens, n_gpus)
    # in token rows: for a plan only the relation of both costs matters
    upload, wait = costs.upload / costs.row, costs.wait / costs.row
    static = _Load.of(static_GE, upload, resident)
    at_most = _WORTH * max(static.work) - wait
    if static.least() >= at_most:
        return static_GE  # it is balanced, or the wait costs more than a balance gains
    placed_GE, load = static_GE, static
    if not resident:
        placed_GE, load = _longest_first(static_GE.sum(0), static, upload)
    placed_GE, work = _split(placed_GE, load, upload, resident)
    return placed_GE if work <= at_most else static_GE


def layer_seconds(rows_GE: Rows, costs: PlacementCosts, resident: bool = False) -> float:
    """The time that the busiest GPU uploads or computes, without `costs.wait`."""
    uploads_G = uploaded(rows_GE, resident)
    return float(np.maximum(uploads_G * costs.upload, rows_GE.sum(1) * costs.row).max())


def uploaded(rows_GE: Rows, resident: bool = False) -> Rows:
    """Experts that each GPU uploads, [G]: those `resident` on it are there."""
    uploaded_GE = rows_GE > 0
    if resident:
        n_gpus, n_experts = rows_GE.shape
        uploaded_GE[owners(n_experts, n_gpus), np.arange(n_experts)] = False
    uploads_G: Rows = uploaded_GE.sum(1)
    return uploads_G


def outbox_slots(n_experts: int, n_gpus: int) -> int:
    """Gradients of one layer for which a GPU has memory, where it computes experts of others: a
    quarter more than its share of the experts. A placement that needs more is not used."""
    return min(n_experts, -(-5 * n_experts // (4 * n_gpus)) + 2)


def shared_parts(rows_GE: Rows) -> Rows:
    """The number of experts that each GPU computes and that their owner does not compute alone,
    [G]."""
    n_gpus, n_experts = rows_GE.shape
    elsewhere_GE = rows_GE > 0
    elsewhere_GE[owners(n_experts, n_gpus), np.arange(n_experts)] = False
    parts_G: Rows = ((rows_GE > 0) & elsewhere_GE.any(0)).sum(1)
    return parts_G


def balance(rows_GE: Rows) -> float:
    """The most token rows of a GPU over the mean; 1 without token rows."""
    rows_G = rows_GE.sum(1)
    return float(rows_G.max() / rows_G.mean()) if rows_G.any() else 1.0


def _counts(tokens: Sequence[int] | NDArray[Any]) -> Rows:
    counts_E = np.asarray(tokens, dtype=np.int64)
    if counts_E.ndim != 1 or (counts_E < 0).any():
        raise ValueError(f"token rows must be one number, at least 0, for each expert: {tokens}")
    return counts_E


@dataclass
class _Load:
    """The work of each GPU, in token rows."""

    rows: list[int]
    uploads: list[float]

    def __post_init__(self) -> None:
        self.mean = sum(self.rows) / len(self.rows)
        self.work = [max(pair) for pair in zip(self.rows, self.uploads, strict=True)]

    def least(self) -> float:
        """No placement has less work on its busiest GPU."""
        return max(self.mean, sum(self.uploads) / len(self.uploads))

    @classmethod
    def of(cls, rows_GE: Rows, upload: float, resident: bool) -> "_Load":
        counts = uploaded(rows_GE, resident).tolist()
        return cls(rows_GE.sum(1).tolist(), [count * upload for count in counts])


def _longest_first(tokens_E: Rows, static: _Load, upload: float) -> tuple[Rows, _Load]:
    """Each expert, the one with the most rows first, to the GPU with the least work so far. Rows
    beyond the mean do not count: they will move to other GPUs."""
    n_gpus, mean = len(static.rows), static.mean
    order = np.argsort(-tokens_E, kind="stable")[: np.count_nonzero(tokens_E)]
    counts_E = tokens_E[order]
    # work so far, token rows, work of the uploads, GPU: equal work is ordered by token rows
    least = [(0.0, 0, 0.0, gpu) for gpu in range(n_gpus)]
    chosen = []
    for count in counts_E.tolist():
        _, rows, uploads, gpu = least[0]
        rows += count
        uploads += upload
        chosen.append(gpu)
        work = rows if rows < mean else mean
        heapq.heapreplace(least, (work if work > uploads else uploads, rows, uploads, gpu))
    rows_GE = np.zeros((n_gpus, len(tokens_E)), np.int64)
    rows_GE[chosen, order] = counts_E
    least.sort(key=lambda entry: entry[3])
    return rows_GE, _Load([entry[1] for entry in least], [entry[2] for entry in least])


def _split(whole_GE: Rows, load: _Load, upload: float, resident: bool) -> tuple[Rows, float]:
    """Move rows from the busiest GPU to the least busy one while that makes it faster; changes
    `load`. Returns the new placement and its work, or the given one if it is as good."""
    rows, uploads, work, mean = load.rows, load.uploads, load.work, load.mean
    before, rows_GE = max(work), whole_GE.copy()
    # A GPU that receives rows has at most the mean afterwards, so it never gives any. All rows of
    # an expert are on one GPU at first.
    giving: dict[int, tuple[int, int]] = {}  # by GPU: the expert whose rows it gives, and how many
    while True:
        busiest = max(work)
        high = work.index(busiest)
        if uploads[high] >= busiest or rows[high] <= (1 + _CLOSE) * mean:
            break
        below = [(work[gpu], gpu) for gpu, count in enumerate(rows) if count + 1 <= mean]
        if not below:
            break
        low = min(below)[1]
        if high not in giving:
            expert = int(rows_GE[high].argmax())
            giving[high] = expert, int(rows_GE[high, expert])
        expert, left = giving[high]
        moved = min(int(rows[high] - mean), int(mean - rows[low]), left)
        if moved < 1 or max(rows[low] + moved, uploads[low] + upload) >= busiest:
            break
        rows_GE[high, expert] = left - moved
        rows_GE[low, expert] = moved
        rows[high] -= moved
        rows[low] += moved
        uploads[low] += upload
        giving[high] = expert, left - moved
        if moved == left:
            del giving[high]
            uploads[high] -= 0 if resident else upload
        work[high] = max(rows[high], uploads[high])
        work[low] = max(rows[low], uploads[low])
    after = max(work)
    return (rows_GE, after) if after <= _WORTH * before else (whole_GE, before)
