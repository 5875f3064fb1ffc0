"""Events and copy streams whose copies end when a test allows it, and small stores."""

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertShape
from overspill.tiers.entry import Entry, Part
from overspill.tiers.layout import RecordLayout
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import CopyStream, Inject, StreamEvent

LAYOUT = RecordLayout(ExpertShape(8, 4, gated=False), torch.float32)
CPU = torch.device("cpu")
WATCHDOG = 60.0


class GatedEvent(StreamEvent):
    """Completes when `open` is called."""

    __slots__ = ("_completed",)

    def __init__(self) -> None:
        super().__init__()
        self._completed = threading.Event()

    def open(self) -> None:
        self._completed.set()

    def done(self) -> bool:
        return self._completed.is_set()

    def wait(self) -> None:
        assert self._completed.wait(WATCHDOG), "the event was never completed"


class GatedStream(CopyStream):
    """Copies at once, but a copy has ended only when `arrive` is called (or `at_once` is set)."""

    def __init__(self, name: str, inject: Inject | None = None, at_once: bool = False) -> None:
        super().__init__(name, CPU, Recorder(), inject)
        self.at_once = at_once
        self.after: list[list[StreamEvent]] = []
        self.sources: list[int] = []  # addresses
        self.events: list[GatedEvent] = []

    def copy(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        label: str,
        after: Iterable[StreamEvent] = (),
        counter: str | None = None,
    ) -> StreamEvent:
        end = GatedEvent()
        super().copy(pairs, label, after, counter)
        self.after.append(list(after))
        self.events.append(end)
        self.sources.append(pairs[0][1].data_ptr())  # last: tests wait for it
        if self.at_once:
            end.open()
        return end

    @property
    def in_flight(self) -> int:
        return sum(not event.done() for event in self.events)

    def arrive(self) -> None:
        """The oldest copy in flight ends."""
        next(event for event in self.events if not event.done()).open()


def host_store(n_experts: int, watchdog: float = WATCHDOG) -> ExpertStore:
    """One layer of experts in host memory, each filled with its number + 1."""
    experts = ExpertMap.whole(n_experts)
    store = ExpertStore(1, experts, LAYOUT, n_experts, 0, False, watchdog_seconds=watchdog)
    for entry in store.places.entries:
        store.host(entry, Part.WEIGHTS).fill_(value_of(entry))
    return store


def disk_store(n_experts: int, permanent: int, cache: int, folder: Path) -> ExpertStore:
    experts = ExpertMap.whole(n_experts)
    return ExpertStore(
        1, experts, LAYOUT, permanent, cache, False, folder, watchdog_seconds=WATCHDOG
    )


def wait_until(store: ExpertStore, ready: Callable[[], bool]) -> None:
    store.sync.wait(ready, "the condition of a test")


def value_of(entry: Entry) -> int:
    """What the weights of the expert's current version are filled with."""
    return (entry.number + 1 + 7 * entry.version) % 256


def rewrite(store: ExpertStore, entries: Sequence[Entry]) -> None:
    """Ends the updates of these experts as the update thread does."""
    for entry in entries:
        store.host(entry, Part.WEIGHTS).fill_(value_of(entry))
        store.end_update(entry)
