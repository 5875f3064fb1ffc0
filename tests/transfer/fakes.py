"""Marks and lanes whose copies end when a test lets them."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from overspill.core.experts import ExpertShape
from overspill.tiers.layout import RecordLayout
from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.trace.recorder import Recorder
from overspill.transfer.lanes import Lane, Mark

LAYOUT = RecordLayout(ExpertShape(8, 4, gated=False), torch.float32)
CPU = torch.device("cpu")


class GatedMark(Mark):
    """Passes when `open` is called."""

    __slots__ = ("_passed",)

    def __init__(self) -> None:
        super().__init__()
        self._passed = threading.Event()

    def open(self) -> None:
        self._passed.set()

    def done(self) -> bool:
        return self._passed.is_set()

    def wait(self) -> None:
        assert self._passed.wait(10), "nobody opened the mark"


class GatedLane(Lane):
    """Carries out a copy when `gate` is open and tells what was copied, and after what."""

    def __init__(self) -> None:
        super().__init__("upload", CPU, Recorder(), None)
        self.names: list[str] = []
        self.after: list[list[Mark]] = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], name: str, after: Iterable[Mark] = ()
    ) -> Mark:
        self.names.append(name)
        self.after.append(list(after))
        self.begun.release()
        assert self.gate.wait(10), "nobody opened the lane"
        return super().copy(pairs, name, after)


def host_store(experts: int) -> ExpertStore:
    """One layer of experts in host memory, each filled with its number + 1."""
    store = ExpertStore(1, experts, LAYOUT, experts, 0, False)
    for entry in store.entries:
        store.host(entry, Part.WEIGHTS).fill_(entry.number + 1)
    return store


def disk_store(experts: int, home: int, cache: int, folder: Path) -> ExpertStore:
    return ExpertStore(1, experts, LAYOUT, home, cache, False, folder)


def wait_until(store: ExpertStore, ready: object, entry: Entry | None = None) -> None:
    """As the main thread waits, but not for ever."""
    with store.lock:
        done = store.wake_main.wait_for(lambda: store.error is not None or ready(), 10)  # type: ignore[operator]
        store.raise_error()
        assert done, f"nothing came of it: {entry.id if entry else ''}"


def value_of(entry: Entry) -> int:
    """What the weights of its version are filled with."""
    return (entry.number + 1 + 7 * entry.version) % 256


def rewrite(store: ExpertStore, entries: list[Entry]) -> None:
    """As the optimizer ends its updates."""
    for entry in entries:
        store.host(entry, Part.WEIGHTS).fill_(value_of(entry))
        with store.lock:
            entry.stale = False
            store.wake_loader.notify()
