"""Policies for `Settings.cpu_policy`: which experts of a pass the CPU computes."""

import random
import threading
from collections.abc import Sequence

from overspill.core.experts import Phase
from overspill.moe.settings import CpuPolicy


def random_policy(seed: int, share: float = 0.5) -> CpuPolicy:
    """Chooses each expert with probability `share`, anew in every call."""
    numbers, lock = random.Random(seed), threading.Lock()

    def choose(counts: Sequence[int], phase: Phase) -> frozenset[int]:
        with lock:
            return frozenset(p for p in range(len(counts)) if numbers.random() < share)

    return choose


def every_other(counts: Sequence[int], phase: Phase) -> frozenset[int]:
    """Processes can be given it."""
    return frozenset(range(0, len(counts), 2))


def all_on_cpu(counts: Sequence[int], phase: Phase) -> frozenset[int]:
    return frozenset(range(len(counts)))


def fixed_policy(*positions: int) -> CpuPolicy:
    return lambda counts, phase: frozenset(positions)
