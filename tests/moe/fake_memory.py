"""The memory of a compute device, without one."""

from overspill.moe.engine import Engine


class FakeMemory:
    """A device whose memory does not change with the batch."""

    def __init__(self, engine: Engine, other: int) -> None:
        self._engine = engine
        self._other = other

    def allocated(self) -> int:
        return self._engine.bytes_by_tier()["gpu"]

    def peak(self) -> int:
        return self.allocated() + self._other

    def available(self) -> int:
        return 1 << 40

    def shortages(self) -> int:
        return 0

    def reset(self) -> None:
        """Nothing is cached."""
