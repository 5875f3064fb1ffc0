"""Which experts have their home on the compute device: how many of each layer."""

import itertools


def spread_homes(total: int, n_layers: int, n_local: int) -> list[int]:
    """`total` experts evenly over the layers, so that every layer streams as many: while one
    computes what it has, the others' experts are uploaded."""
    assert 0 <= total <= n_layers * n_local
    ends = [total * layer // n_layers for layer in range(n_layers + 1)]
    return [after - before for before, after in itertools.pairwise(ends)]


def homes_within(free: int, at_home: int, expert: int, total: int) -> int:
    """How many of `total` experts can live on the device if `at_home` do now and `free` bytes are
    free at the peak of a step, or missing; an expert needs `expert` bytes."""
    return max(0, min(total, at_home + free // expert))
