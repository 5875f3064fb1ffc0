"""The division of time between prompts and answers."""

from collections.abc import Sequence

from overspill.serve.scheduler import BatchItem

_MOST = 2.0
"""Seconds that prompts wait at most: a batch may be slow once, as when kernels are compiled."""


class Pacing:
    """Gives answers that run a share of the time while prompts are computed.

    A batch with tokens of prompts uses most experts. If they are streamed it takes as long as
    dozens of batches without prompts, whatever the number of its tokens, and smaller parts of
    prompts would not help. So after such a batch, answers alone are computed until they have had
    their share. The time of each batch is measured: where prompts are fast, they hardly wait.
    """

    def __init__(self, share: float) -> None:
        """`share` of the time is for batches without prompts while answers run."""
        assert 0 <= share < 1
        self._ratio = share / (1 - share)
        self._owed = 0.0  # seconds, to answers
        self._step = 0.0  # seconds of the last batch without prompts

    @property
    def allows_prompts(self) -> bool:
        """Whether the next batch may have tokens of prompts. A batch of answers that takes longer
        than they are owed waits for a later turn."""
        return self._owed <= self._step

    def record(self, batch: Sequence[BatchItem], seconds: float) -> None:
        """Record the time of a batch, before its tokens are counted as computed."""
        with_prompts = [item.request.pending > 1 for item in batch]
        if all(with_prompts):  # no answer has waited
            self._owed = 0.0
        elif any(with_prompts):
            self._owed = min(self._owed + self._ratio * seconds, _MOST)
        else:
            self._step = seconds
            self._owed = max(0.0, self._owed - seconds)
