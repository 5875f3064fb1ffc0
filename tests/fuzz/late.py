"""Copies on a CPU that end later than they are issued, as on a GPU."""

import queue
import random
import threading
import time
from collections.abc import Callable

import torch


class LateEvent:
    """The end of a late copy, with the interface of a CUDA event."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def record(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("set when the copy has ended")

    def wait(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("no stream of a GPU waits for it")

    def query(self) -> bool:
        return self._ended.is_set()

    def synchronize(self) -> None:
        self._ended.wait()

    def set(self) -> None:
        self._ended.set()


class LateStream:
    """Carries out copies in a thread, in order, each some time after the one before. `defer` is
    what `Settings.inject` returns for them."""

    def __init__(self, name: str, seed: int, longest: float | None = None) -> None:
        """Without `longest` the seed chooses it."""
        self._rng = random.Random(f"{name} {seed}")
        self._longest = longest or self._rng.choice((3e-4, 3e-3, 1e-2))
        self._copies: queue.SimpleQueue[tuple[Callable[[], None], LateEvent] | None]
        self._copies = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"late {name}", daemon=True)
        self._thread.start()

    def defer(self, copy: Callable[[], None]) -> LateEvent:
        end = LateEvent()
        self._copies.put((copy, end))
        return end

    @torch.no_grad()
    def _run(self) -> None:
        while (late := self._copies.get()) is not None:
            copy, end = late
            time.sleep(self._longest * self._rng.random() ** 2)
            copy()
            end.set()

    def close(self) -> None:
        """After all copies."""
        self._copies.put(None)
        self._thread.join()
