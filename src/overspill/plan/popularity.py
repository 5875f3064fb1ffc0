"""Decisions on the popularity predictor: its use, and its accuracy. No tensors here."""

from collections.abc import Sequence

SHARE = 0.01
"""Share of the time of prompts and steps that learning may take."""
_LONGEST_GAP = 5.0
"""Seconds between two forwards that count as their time; the rest of a longer gap is idle."""
_FIRST_AFTER = 0.1
"""Seconds of passes before the first learning, whose time is not known."""
_RETRY = 8
"""Passes through a layer until a prediction is tried again where history is closer."""
_DECAY = 0.9
"""Weight of an error of expected rows relative to the one after it."""


class LearningPace:
    """Allows learning as long as all of it takes at most `share` of the time of passes."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._last: float | None = None  # time of the last pass
        self._longest: float | None = None  # seconds of a learning, lately
        self.seconds = 0.0
        """Spent on learning."""
        self.busy = 0.0
        """Seconds of passes. What is learned in them is part of it."""

    def allows(self, now: float) -> bool:
        """Whether a pass that begins `now` (seconds of any clock) may be learned from."""
        if self._last is not None:
            self.busy += min(max(0.0, now - self._last), _LONGEST_GAP)
        self._last = now
        if self._longest is None:
            return self._share * self.busy >= self._share * _FIRST_AFTER
        return self.seconds + self._longest <= self._share * self.busy

    def idle(self) -> None:
        """Note that the time until the next pass is not spent in passes."""
        self._last = None

    def spent(self, seconds: float) -> None:
        """Learning took this long."""
        self.seconds += seconds
        # the first one may load libraries: it is paid for, and forgotten as an estimate
        self._longest = seconds if self._longest is None else max(seconds, self._longest / 2)


class RowErrors:
    """Recent errors of two expectations of the token rows of a layer's experts."""

    def __init__(self) -> None:
        self._predicted: float | None = None
        self._history = 0.0
        self._left_out = 0

    def note(
        self, real: Sequence[float], predicted: Sequence[float], history: Sequence[float]
    ) -> None:
        """Note the real rows of a pass, and the expected ones."""
        errors = _distance(real, predicted), _distance(real, history)
        if self._predicted is None:
            self._predicted, self._history = errors
        else:
            self._predicted = _DECAY * self._predicted + (1 - _DECAY) * errors[0]
            self._history = _DECAY * self._history + (1 - _DECAY) * errors[1]

    @property
    def prefers_prediction(self) -> bool:
        """False until both were compared."""
        return self._predicted is not None and self._predicted <= self._history

    def wants_prediction(self) -> bool:
        """Whether a prediction for the next pass is worth its time; asked once for each pass."""
        if self._predicted is None or self.prefers_prediction or self._left_out + 1 >= _RETRY:
            self._left_out = 0
            return True
        self._left_out += 1
        return False


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True))


def rarest(n_experts: int) -> tuple[int, int]:
    """The (n, m) of `expert_accuracy` in APTMoE: a quarter and three eighths of the experts."""
    return max(1, n_experts // 4), max(1, 3 * n_experts // 8)


def expert_accuracy(predicted: Sequence[float], real: Sequence[float], n: int, m: int) -> float:
    """The share of the n experts with the fewest predicted rows that are among the m with the
    fewest real ones. Experts with equal rows are in no order: the mean over all orders."""
    pairs = zip(_among_fewest(predicted, n), _among_fewest(real, m), strict=True)
    return sum(a * b for a, b in pairs) / n


def _among_fewest(rows: Sequence[float], n: int) -> list[float]:
    """The probability of each expert to be among the n with the fewest rows."""
    border = sorted(rows)[n - 1]
    below, tied = sum(row < border for row in rows), sum(row == border for row in rows)
    return [1.0 if row < border else (n - below) / tied * (row == border) for row in rows]
