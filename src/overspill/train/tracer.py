"""Choice of the steps of a run that are traced."""

import time

from overspill.trace.recorder import Recorder


class Tracer:
    """Tracer of the first `count` of every `every` steps; the others run at full speed."""

    def __init__(self, recorder: Recorder, every: int, count: int) -> None:
        self.recorder = recorder
        self._every, self._count = every, min(count, every)
        self._since = self._until = 0
        self._running = False

    def before_step(self, step: int) -> None:
        if step % self._every < self._count and not self._running:
            self.recorder.clear()  # at the end of the run only the last group is left
            self.recorder.start()
            self._running = True
            self._since = time.perf_counter_ns()

    def after_step(self, step: int) -> None:
        if not self._running:
            return
        self._until = time.perf_counter_ns()
        if step % self._every == self._count - 1:
            self.recorder.stop()
            self._running = False

    def busy(self) -> dict[str, float] | None:
        """The busy share of each trace lane in the last traced steps; None before the first."""
        if self._until <= self._since:
            return None
        return self.recorder.busy(self._since, self._until)
