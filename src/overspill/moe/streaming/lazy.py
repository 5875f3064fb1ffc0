"""Streaming that starts when an expert is not resident."""

from collections.abc import Callable

from overspill.moe.settings import Settings
from overspill.moe.streaming.gradients import StreamingGradients
from overspill.moe.streaming.streaming import Streaming


class LazyStreaming:
    """Holder of an engine's `Streaming`, which has slots and threads. If all experts have been
    resident from the beginning there is none, and methods are no-ops."""

    def __init__(self, new: Callable[[Settings], Streaming], settings: Settings) -> None:
        self._new = new
        self._settings = settings
        self.started: Streaming | None = None

    def start(self, keep: bool | None) -> None:
        """Start streaming, once. `keep` is whether the optimizer keeps gradients; None: there is no
        optimizer yet."""
        if self.started is not None:
            return
        streaming = self._new(self._settings)
        try:
            if keep is not None and streaming.gradients is not None:
                streaming.gradients.allocate(keep)
        except BaseException:
            streaming.close()
            raise
        self.started = streaming

    @property
    def gradients(self) -> StreamingGradients | None:
        return None if self.started is None else self.started.gradients

    @property
    def device_bytes(self) -> int:
        """Memory of the device for slots and gradients of streamed experts."""
        return 0 if self.started is None else self.started.device_bytes

    def set_settings(self, settings: Settings) -> None:
        """While nothing is being computed or transferred."""
        if self.started is not None:
            self.started.set_settings(settings)  # first: it may refuse them
        self._settings = settings

    def wait(self) -> None:
        """Waits until every transfer and update has ended."""
        if self.started is not None:
            self.started.wait()

    def recover(self) -> None:
        """Before a pass or a decoding step: a failure of transfers in an earlier one is over."""
        if self.started is not None:
            self.started.recover()

    def check_conserved(self) -> None:
        if self.started is not None:
            self.started.check_conserved()

    def interrupt(self) -> None:
        """Makes a pass of another thread raise where it waits."""
        if self.started is not None:
            self.started.interrupt()

    def close(self) -> None:
        if self.started is not None:
            self.started.close()
