"""Comparisons with tolerances for rounding, relative to the norm of a tensor or of its update."""

import torch
from torch import Tensor

from tests.fuzz.oracle import Difference
from tests.fuzz.program import Case
from tests.fuzz.side import Values

# fp32 sums in another order; bf16 products rounded in another order
TOLERANCE = {"float32": 5e-4, "bfloat16": 0.35}
# of weights: a new optimizer starts from rounded ones
ROUNDING = {"float32": 3e-7, "bfloat16": 2**-9}
FLOOR = 1e-2  # of the largest norm: a tensor whose terms cancel has only rounding left


def compare(mine: Values, theirs: Values, case: Case) -> None:
    """Losses, norms, logits or gradients."""
    _same_names(mine, theirs)
    largest = max([_norm(value) for value in theirs.values()], default=0.0)
    for name, expected in theirs.items():
        limit = TOLERANCE[case.dtype] * (_norm(expected) + FLOOR * largest)
        _check(name, mine[name], expected, limit)


def compare_states(mine: Values, theirs: Values, base: Values, case: Case) -> None:
    """Weights are compared by their change since `base`, moments by themselves."""
    _same_names(mine, theirs)
    tolerance = TOLERANCE[case.dtype]
    largest = dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), 0.0)
    changes = {}
    for name, expected in theirs.items():
        kind = name.split()[0]
        if kind in largest:
            change = expected - base[name] if kind == "weight" else expected
            changes[name] = _norm(change)
            largest[kind] = max(largest[kind], changes[name])
    for name, expected in theirs.items():
        kind = name.split()[0]
        if kind not in largest:
            if mine[name].item() != expected.item():
                raise Difference(f"{name} is {mine[name].item()}, not {expected.item()}")
            continue
        limit = tolerance * (changes[name] + FLOOR * largest[kind])
        if kind == "weight":
            limit += ROUNDING[case.dtype] * _norm(expected)
        _check(name, mine[name], expected, limit)


def _same_names(mine: Values, theirs: Values) -> None:
    if mine.keys() != theirs.keys():
        missing, more = sorted(theirs.keys() - mine.keys()), sorted(mine.keys() - theirs.keys())
        raise Difference(f"missing: {missing[:3]}, not expected: {more[:3]}")


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.float()))


def _check(name: str, mine: Tensor, expected: Tensor, limit: float) -> None:
    if mine.shape != expected.shape:
        raise Difference(f"{name} has shape {tuple(mine.shape)}, not {tuple(expected.shape)}")
    distance = _norm(mine.float() - expected.float().to(mine.device))
    if not distance <= limit:
        raise Difference(f"{name} differs by {distance:.3g}, more than {limit:.3g}")
