"""Which steps of a run are traced."""

import time
from collections.abc import Callable

from overspill.trace.recorder import Recorder


class Tracer:
    """Records the first `count` steps of every `every`; the others run at full speed."""

    def __init__(
        self,
        recorder: Recorder,
        every: int,
        count: int,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.recorder = recorder
        self._every, self._count, self._clock = every, min(count, every), clock
        self._since = self._until = 0
        self._running = False

    def before_step(self, step: int) -> None:
        if step % self._every < self._count and not self._running:
            self.recorder.clear()  # what stays at the end of the run is the last group
            self.recorder.start()
            self._running = True
            self._since = self._clock()

    def after_step(self, step: int) -> None:
        if not self._running:
            return
        self._until = self._clock()
        if step % self._every == self._count - 1:
            self.recorder.stop()
            self._running = False

    def busy(self) -> dict[str, float] | None:
        """How busy each row was over the newest traced steps; None before there are any."""
        if self._until <= self._since:
            return None
        return self.recorder.busy(self._since, self._until)
