"""The number of resident experts of each layer, and of gradients beside them."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple


def spread_residents(total: int, n_layers: int, n_local: int) -> list[int]:
    """`total` experts evenly over the layers, so that every layer streams as many: while one
    computes what it has, the others' experts are uploaded."""
    assert 0 <= total <= n_layers * n_local
    ends = [total * layer // n_layers for layer in range(n_layers + 1)]
    return [after - before for before, after in itertools.pairwise(ends)]


# gradients that the device reads over the link while the CPU updates an expert; it computes too
_READ_PER_UPDATE = 2


def spread_among(count: int, residents: Sequence[int]) -> list[int]:
    """`count` of the resident experts evenly over them: of each layer at most `residents`."""
    ends = [0, *itertools.accumulate(residents)]
    assert 0 <= count <= ends[-1]
    cuts = [count * end // max(1, ends[-1]) for end in ends]
    return [after - before for before, after in itertools.pairwise(cuts)]


class DeviceShare(NamedTuple):
    """Experts and gradients on the compute device, beside the slots."""

    experts: int  # resident ones
    gradients: int = 0  # sums of gradients of streamed experts, or kept ones of resident experts


def share_memory(
    free: int,
    now: DeviceShare,
    expert: int,
    total: int,
    gradient: int = 0,
    kept: int = 0,
    sums: int | None = None,
) -> DeviceShare:
    """The share that fits on the device if `now` is there and `free` bytes are free at the peak of
    a step (negative: missing). A resident expert needs `expert` bytes; `total` is the number of
    experts. If gradients are accumulated, the sum of an expert needs `gradient` bytes, on either
    side. Sums come first: for each byte they save more traffic of host memory than resident
    experts. There are at most `sums` of them at a time, by default one for each streamed expert.

    If gradients are kept for clipping and can wait in host memory, one of a resident expert needs
    `kept` bytes on the device."""
    free += now.experts * expert + now.gradients * (gradient + kept)
    if kept:
        return _share_kept(max(0, free), expert, total, kept)
    most = total if sums is None else min(sums, total)
    beside_all = (free - total * gradient) // (expert - gradient)  # a sum for each streamed one
    beside_most = (free - most * gradient) // expert
    experts = max(0, min(total, max(beside_all, beside_most)))
    if gradient == 0:
        return DeviceShare(experts)
    room = (free - experts * expert) // gradient
    return DeviceShare(experts, max(0, min(total - experts, most, room)))


def _share_kept(free: int, expert: int, total: int, kept: int) -> DeviceShare:
    """Experts come first. But the device reads gradients from host memory while the CPU updates
    streamed experts: the fewer there are, the fewer gradients can wait in host memory for free."""
    per_expert = expert + kept * (1 + _READ_PER_UPDATE)
    balanced = (free + kept * _READ_PER_UPDATE * total) // per_expert
    experts = min(total, free // expert, balanced)
    return DeviceShare(experts, min(experts, (free - experts * expert) // kept))
