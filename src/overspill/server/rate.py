"""The rate of new tokens."""

import time
from collections import deque
from collections.abc import Callable

_WINDOW = 5.0


class TokenRate:
    """Counter of tokens, and of the tokens of the last seconds in steps of a quarter second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._steps: deque[tuple[int, int]] = deque()  # number of the step, tokens in it
        self.total = 0

    def add(self, tokens: int) -> None:
        """Count tokens. Only the thread that computes calls this; other threads only read."""
        self.total += tokens
        step = int(self._clock() * 4)
        if self._steps and self._steps[-1][0] == step:
            tokens += self._steps.pop()[1]
        self._steps.append((step, tokens))
        while self._steps[0][0] < step - 4 * _WINDOW:
            self._steps.popleft()

    def per_second(self) -> float:
        """Return the mean rate of the last five seconds."""
        now = self._clock()
        first = int(now * 4) - int(4 * _WINDOW) + 1
        tokens = sum(tokens for step, tokens in list(self._steps) if step >= first)
        return tokens / max(0.25, now - max(first / 4, self._began))
