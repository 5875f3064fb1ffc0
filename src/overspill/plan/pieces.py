"""The number of prompt tokens that a batch computes."""

_GROWTH = 4
"""Ratio of the sizes that are compared."""
_GAIN = 1.5
"""Gain in cost per token that makes a piece of `_GROWTH` times the size worthwhile."""
_RETRY = 16
"""Batches after which a size that was not worthwhile is tried again: one slow batch may be the
fault of something else."""
_SECONDS, _TIMES = 0.5, 2.0
"""A piece takes at most so long, or so many times as long as the smallest: a prompt that arrives
meanwhile waits for its end."""


class PieceSizes:
    """Sizes of the pieces in which long prompts are computed, chosen by measured time.

    A batch with hundreds of tokens reads nearly all experts and, where experts are streamed,
    uploads them. While this takes most of its time, a batch with four times as many tokens takes
    hardly longer. So pieces grow until four times the tokens take about four times as long, or
    until prompts that arrive meanwhile would wait too long.
    """

    def __init__(self, least: int, most: int | None = None) -> None:
        """Pieces have at least `least` tokens, and at most `most` (None: any number)."""
        assert least >= 1
        self._least = least
        self._most = most
        self._fits: int | None = None
        """Tokens of a piece after memory was short; None: it has not been, of late."""
        self._short_at = 0  # the batch
        self._cost: dict[int, float] = {}
        """Seconds of a token, by the size of the piece."""
        self._measured_at: dict[int, int] = {}
        self._count = -1  # of batches; the first one may have compiled kernels

    def size(self, room: int) -> int:
        """The tokens of the next piece; `room` tokens fit into memory."""
        size = self._least
        while size in self._cost:
            larger = _GROWTH * size
            cost = self._cost.get(larger)
            if cost is not None and cost * _GAIN > self._cost[size]:
                if self._count - self._measured_at[larger] < _RETRY:
                    break
                cost = None
            size = larger
            if cost is None:
                break
        if self._most is not None:
            room = min(room, self._most)
        longest = max(_SECONDS, _TIMES * self._cost.get(self._least, 0.0) * self._least)
        while size > self._least and self._expected(min(size, room)) > longest:
            size //= _GROWTH
        size = max(self._least, min(size, room))
        return size if self._fits is None else min(size, self._fits)

    def _expected(self, tokens: int) -> float:
        """The seconds that a piece is expected to take, by the two largest that are not larger; 0
        if that is unknown, or if this size was measured long ago."""
        known = sorted(size for size in self._cost if size <= tokens)[-2:]
        if len(known) < 2:
            return 0.0
        small, large = known
        if tokens == large and self._count - self._measured_at[large] >= _RETRY:
            return 0.0
        before, seconds = self._cost[small] * small, self._cost[large] * large
        return seconds + max(0.0, seconds - before) * (tokens - large) / (large - small)

    def record(self, tokens: int, seconds: float) -> None:
        """A batch with so many tokens of prompts has taken this time. Only full pieces count."""
        self._count += 1
        if self._fits is not None and self._count - self._short_at >= _RETRY:
            self._fits = None  # the memory may be free again
        size = self._least
        while _GROWTH * size <= tokens:
            size *= _GROWTH
        if self._count and size <= tokens < 1.25 * size:
            self._cost[size] = seconds / tokens
            self._measured_at[size] = self._count

    def shrink(self, tokens: int, least: int | None = None) -> bool:
        """A piece with so many tokens does not fit into memory: the next ones are smaller, for
        `_RETRY` batches. False if they would have fewer than `least` tokens (None: as at the
        beginning)."""
        least = self._least if least is None else least
        if tokens <= least:
            return False
        self._fits, self._short_at = max(least, tokens // 2), self._count
        return True
