"""Comparisons with tolerances for rounding, relative to the norm of a tensor or of its update."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tests.fuzz.oracle import Difference
from tests.fuzz.program import Case
from tests.fuzz.side import Values


class Tolerance(NamedTuple):
    """Of each kind of value."""

    loss: float
    norm: float
    logits: float
    gradient: float
    weight: float
    exp_avg: float
    exp_avg_sq: float
    rounding: float
    """Of weights, if a new optimizer has started from rounded ones."""
    floor: float
    """Of the largest norm: a tensor whose terms cancel has only rounding left."""


FLOAT32 = 5e-4  # sums in another order
MASTER = 3e-7  # of weights: their updates add up in fp32
# bf16: products rounded in another order. Each is 2.5 to 4 times what the worst of 600 programs on
# a CPU needs; a GPU rounds in yet another order.
TOLERANCES = {
    "float32": Tolerance(*[FLOAT32] * 7, rounding=0.0, floor=1e-2),
    "bfloat16": Tolerance(
        loss=0.015,
        norm=0.025,
        logits=0.06,
        gradient=0.13,
        weight=0.2,
        exp_avg=0.08,
        exp_avg_sq=0.12,
        rounding=2**-9,
        floor=3e-2,
    ),
}
STATES = ("weight", "exp_avg", "exp_avg_sq")


class Compared(NamedTuple):
    """One tensor, or that of one expert."""

    name: str
    kind: str
    mine: Tensor
    expected: Tensor
    size: float
    """The norm of what may be wrong: the value, or the change of a weight."""
    largest: float
    """The largest norm of its kind."""
    rounded: bool = False

    @property
    def distance(self) -> float:
        return _norm(self.mine - self.expected)

    def limit(self, tolerance: Tolerance) -> float:
        limit = getattr(tolerance, self.kind) * (self.size + tolerance.floor * self.largest)
        if self.kind == "weight":
            rounding = tolerance.rounding if self.rounded else 0.0
            limit += (MASTER + rounding) * _norm(self.expected)
        return float(limit)


def compare(mine: Values, theirs: Values, case: Case) -> None:
    """Losses, norms, logits or gradients."""
    _check(_observed(mine, theirs), case)


def compare_states(
    mine: Values, theirs: Values, base: Values, case: Case, rounded: bool = False
) -> None:
    """Weights are compared by their change since `base`, moments by themselves, and those of each
    expert apart from the others. `rounded`: weights of bf16 were rounded since."""
    _check((pair._replace(rounded=rounded) for pair in _states(mine, theirs, base)), case)


def _observed(mine: Values, theirs: Values) -> Iterator[Compared]:
    _check_names(mine, theirs)
    largest = max([_norm(value) for value in theirs.values()], default=0.0)
    for name, expected in theirs.items():
        kind = "gradient" if name.startswith("grad") else name
        yield _compared(name, kind, mine[name], expected, expected, largest)


def _states(mine: Values, theirs: Values, base: Values) -> Iterator[Compared]:
    _check_names(mine, theirs)
    largest = dict.fromkeys(STATES, 0.0)
    for name, expected in theirs.items():
        kind = name.split()[0]
        if kind in STATES:
            change = expected - base[name] if kind == "weight" else expected
            largest[kind] = max(largest[kind], _norm(change))
    for name, expected in theirs.items():
        kind = name.split()[0]
        if kind not in STATES:
            if mine[name].item() != expected.item():
                raise Difference(f"{name} is {mine[name].item()}, not {expected.item()}")
            continue
        change = expected - base[name] if kind == "weight" else expected
        whole = _compared(name, kind, mine[name], expected, change, largest[kind])
        if expected.dim() < 3:
            yield whole
            continue
        for index, parts in enumerate(zip(whole.mine, whole.expected, change, strict=True)):
            yield _compared(f"{name}[{index}]", kind, *parts, largest[kind])


def _compared(
    name: str, kind: str, mine: Tensor, expected: Tensor, change: Tensor, largest: float
) -> Compared:
    if mine.shape != expected.shape:
        raise Difference(f"{name} has shape {tuple(mine.shape)}, not {tuple(expected.shape)}")
    expected = expected.float().to(mine.device)
    return Compared(name, kind, mine.float(), expected, _norm(change), largest)


def _check(pairs: Iterator[Compared], case: Case) -> None:
    tolerance = TOLERANCES[case.dtype]
    for pair in pairs:
        distance, limit = pair.distance, pair.limit(tolerance)
        if not distance <= limit:
            raise Difference(f"{pair.name} differs by {distance:.3g}, more than {limit:.3g}")


def _check_names(mine: Values, theirs: Values) -> None:
    if mine.keys() != theirs.keys():
        missing, more = sorted(theirs.keys() - mine.keys()), sorted(mine.keys() - theirs.keys())
        raise Difference(f"missing: {missing[:3]}, not expected: {more[:3]}")


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.float()))
