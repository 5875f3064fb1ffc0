"""Gradients on their way to the ranks that own their experts.

Each rank writes the gradients that it computes of experts which it, or another rank, does not own
alone into slots of its outbox. Owners read them there. All ranks know from the placement of a pass
which gradient is in which slot. Passes use the two halves of the outbox in turn.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overspill.core.errors import EngineError
from overspill.tiers.layout import RecordLayout
from overspill.tiers.shared_experts import SharedExperts
from overspill.tiers.slab import HostSlab
from overspill.tiers.store import ExpertStore
from overspill.tiers.worker_sync import Watchdog
from overspill.transfer.streams import StreamEvent

_POLL_SECONDS = 2e-4
_CLOSING_SECONDS = 5.0  # how long a rank that closes still waits for gradients of others


@dataclass(frozen=True)
class GradientPart:
    """The gradient of an expert from the token rows of one rank."""

    rank: int
    slot: int
    number: int  # of the pass
    gradient: Tensor  # flat
    square: Tensor  # the sum of its squares


class Outboxes:
    """The outbox of this rank, and the outboxes of the others as owners see them."""

    def __init__(self, shared: SharedExperts, store: ExpertStore) -> None:
        self._shared = shared
        self._store = store
        self._sync = store.sync
        sizes = shared.own.sizes
        self._half = sizes.outbox_slots // 2
        self.slab = HostSlab(
            "gradients for other ranks",
            sizes.outbox_slots,
            sizes.outbox_slot,
            store.memory.pinned,
            memory=shared.own.outbox,
        )
        shape = sizes.outbox_slots, sizes.outbox_slot
        self._records = [memory.outbox.view(shape) for memory in shared.memories]
        self._owners = [rank for rank, part in enumerate(shared.parts) for _ in part.local_ids]
        self._number = 0  # of the pass
        # parts of the pass, by expert, that this rank writes or, as the owner, reads
        self._parts: dict[int, list[GradientPart]] = {}
        # by half: gradients that owners must take before it is used again, (owner, slot, pass)
        self._sent: list[list[tuple[int, int, int]]] = [[], []]
        self._closing: float | None = None

    def begin(self, shared: Mapping[int, tuple[int, ...]]) -> None:
        """Begin a backward, in which ranks compute experts that they share: `shared` has the ranks
        by expert. Waits until owners have taken the gradients of the last pass but one."""
        self._parts = {}
        if not shared:
            return
        self._number += 1
        half = self._number % 2
        self._wait_taken(self._sent[half])
        self._sent[half] = []
        own, used = self._shared.rank, [half * self._half] * len(self._records)
        for expert, ranks in sorted(shared.items()):
            owner = self._owners[expert]
            for rank in ranks:
                slot, used[rank] = used[rank], used[rank] + 1
                if own in (rank, owner):
                    self._parts.setdefault(expert, []).append(self._part(rank, slot))
                if own == rank:
                    self._sent[half].append((owner, slot, self._number))
        assert max(used) <= (half + 1) * self._half, "the placement needs too many slots"

    def _part(self, rank: int, slot: int) -> GradientPart:
        layout: RecordLayout = self._store.memory.layout
        own = rank == self._shared.rank  # in pinned memory
        record = self.slab[slot] if own else self._records[rank][slot]
        square = record[layout.weight_bytes : layout.weight_bytes + 4].view(torch.float32)[0]
        return GradientPart(rank, slot, self._number, layout.weights(record), square)

    def own_part(self, expert: int) -> GradientPart | None:
        """Return the part of an expert's gradient that this rank writes in this pass; None if it
        does not share the expert."""
        parts = self._parts.get(expert, ())
        return next((part for part in parts if part.rank == self._shared.rank), None)

    def owned(self) -> Iterator[tuple[int, list[GradientPart]]]:
        """Yield the experts of this rank whose gradients are in outboxes in this pass, and their
        parts in the order of ranks."""
        for expert, parts in self._parts.items():
            if self._owners[expert] == self._shared.rank:
                yield expert, parts

    def publish(self, part: GradientPart) -> None:
        """Tell the owner that a gradient is in the outbox of this rank."""
        self._shared.own.sent[part.slot] = part.number

    def arrival(self, parts: Sequence[GradientPart]) -> StreamEvent:
        """Return the event after which all parts have been published."""
        return StreamEvent(_Arrival(self, parts))

    def take(self, parts: Sequence[GradientPart]) -> None:
        """Let ranks use the slots again, which this rank, the owner, has read."""
        for part in parts:
            self._shared.own.taken[part.rank, part.slot] = part.number

    def was_taken(self, part: GradientPart) -> bool:
        """Whether this rank has taken a part."""
        return bool(self._shared.own.taken[part.rank, part.slot] >= part.number)

    def have_arrived(self, parts: Sequence[GradientPart]) -> bool:
        """Whether all parts have been published. Raises if the outboxes have been closed for some
        time: a rank may be gone."""
        memories = self._shared.memories
        if all(memories[part.rank].sent[part.slot] >= part.number for part in parts):
            return True
        if self._closing is not None and time.monotonic() > self._closing:
            ranks = sorted({part.rank for part in parts})
            raise EngineError(f"closed while it waited for gradients of the ranks {ranks}")
        return False

    def wait_arrived(self, parts: Sequence[GradientPart]) -> None:
        """Block until all parts have been published."""
        self._wait(lambda: self.have_arrived(parts), "gradients of other ranks")

    def _wait_taken(self, sent: Sequence[tuple[int, int, int]]) -> None:
        memories, rank = self._shared.memories, self._shared.rank
        self._wait(
            lambda: all(
                memories[owner].taken[rank, slot] >= number for owner, slot, number in sent
            ),
            "other ranks to take gradients",
        )

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Block until `ready()`, which depends on other ranks. Raises as `WorkerSync.wait`."""
        watchdog: Watchdog | None = None
        while not ready():
            watchdog = watchdog or self._sync.watchdog(what)
            memories = self._shared.memories
            progress = [int(m.sent.sum() + m.taken.sum() + m.versions.sum()) for m in memories]
            with self._sync.lock:
                self._sync.raise_error()
                watchdog.check(progress)
            time.sleep(_POLL_SECONDS)

    def check_conserved(self) -> None:
        """Assert, when this rank is idle, that it has published all of its gradients."""
        for _, slot, number in (sent for half in self._sent for sent in half):
            assert self._shared.own.sent[slot] == number, "a gradient was not sent"

    def stop(self) -> None:
        """Let update threads wait for other ranks, which may be gone, for a few seconds only."""
        self._closing = time.monotonic() + _CLOSING_SECONDS

    def close(self) -> None:
        self.slab.close()
        self._records.clear()
        self._parts.clear()


class _Arrival:
    """The event of gradients that other processes write."""

    def __init__(self, outboxes: Outboxes, parts: Sequence[GradientPart]) -> None:
        self._outboxes = outboxes
        self._parts = parts

    def query(self) -> bool:
        return self._outboxes.have_arrived(self._parts)

    def synchronize(self) -> None:
        while not self.query():
            time.sleep(_POLL_SECONDS)

    def record(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("other processes record it")

    def wait(self, stream: torch.cuda.Stream) -> None:
        raise AssertionError("no stream waits for it")
