"""A clock for what takes its time from an argument."""


class Clock:
    """Moves when a test moves it, and by `step` each time it is read."""

    def __init__(self, step: float = 0.0) -> None:
        self.step = step
        self.seconds = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        self.seconds += self.step
        return self.seconds
