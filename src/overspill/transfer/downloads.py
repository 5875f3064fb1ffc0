"""Gradients on their way from the compute device to host memory."""

from collections import Counter, deque
from collections.abc import Sequence

from torch import Tensor

from overspill.tiers.slab import HostSlab
from overspill.tiers.worker_sync import WorkerSync
from overspill.transfer.streams import CopyStream, StreamEvent


class GradientRing:
    """Pinned buffers for gradients that go straight into an update.

    `take` blocks while all are in use: a slow optimizer slows down a fast backward instead of
    filling the memory. A buffer may have several users, each of which gives it back.
    """

    def __init__(self, sync: WorkerSync, buffers: HostSlab) -> None:
        self._sync = sync
        self.buffers = buffers
        self._free = list(range(len(buffers)))
        self._users = [0] * len(buffers)

    def take(self) -> int:
        with self._sync.lock:
            self._sync.wait(lambda: bool(self._free), "a gradient buffer (update threads)")
            index = self._free.pop()
            self._users[index] = 1
            return index

    def share(self, index: int) -> None:
        """Add a user to a buffer. The caller is one of its users."""
        with self._sync.lock:
            self._users[index] += 1

    def give(self, index: int) -> None:
        with self._sync.lock:
            self._users[index] -= 1
            if not self._users[index]:
                self._free.append(index)
                self._sync.wake_main()

    def reset(self) -> None:
        """Free every buffer, when no copy and no update is pending."""
        with self._sync.lock:
            self._free = list(range(len(self.buffers)))

    def check_conserved(self) -> None:
        """Assert, when idle, that every buffer is free."""
        assert sorted(self._free) == list(range(len(self.buffers))), "gradient buffers leaked"


class Downloads:
    """The copy stream of gradients. Keeps their device tensors alive until the copy has ended, and
    at most `limit` bytes of them: the GPU budget is hard."""

    def __init__(self, stream: CopyStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._held: deque[tuple[StreamEvent, list[Tensor]]] = deque()
        # whole allocations count: the gradient of one expert keeps that of its wave alive
        self._users: Counter[int] = Counter()
        self._bytes = 0

    def send(
        self, pairs: Sequence[tuple[Tensor, Tensor]], label: str, after: StreamEvent
    ) -> StreamEvent:
        sources = [source for _, source in pairs]
        self._count(sources, 1)
        while self._held and (self._held[0][0].done() or self._bytes > self._limit):
            self._release()
        event = self._stream.copy(pairs, label, after=[after])
        self._held.append((event, sources))
        return event

    def _release(self) -> None:
        event, sources = self._held[0]
        event.wait()  # first: an interrupt must not free what is being copied
        self._held.popleft()
        self._count(sources, -1)

    def _count(self, sources: list[Tensor], change: int) -> None:
        for source in sources:
            storage = source.untyped_storage()
            pointer = storage.data_ptr()
            before = self._users[pointer]
            self._users[pointer] += change
            if before == 0:
                self._bytes += storage.nbytes()
            elif before + change == 0:
                self._bytes -= storage.nbytes()
                del self._users[pointer]

    def wait(self) -> None:
        """Block until every copy has ended."""
        while self._held:
            self._release()
        self._users.clear()  # of copies that failed
        self._bytes = 0
