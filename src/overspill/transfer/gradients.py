"""Gradients on their way from the compute device to host memory."""

from collections import Counter, deque
from collections.abc import Sequence

from torch import Tensor

from overspill.tiers.slab import HostSlab
from overspill.tiers.store import ExpertStore
from overspill.transfer.lanes import Lane, Mark


class GradientRing:
    """Pinned buffers that gradients pass through when they need not be kept.

    `take` blocks while all are in use: that is how a slow optimizer slows down a fast backward
    instead of filling the memory.
    """

    def __init__(self, store: ExpertStore, buffers: HostSlab) -> None:
        self.store = store
        self.buffers = buffers
        self._free = list(range(len(buffers)))

    def take(self) -> int:
        with self.store.lock:
            self.store.wait_main(lambda: bool(self._free))
            return self._free.pop()

    def give(self, index: int) -> None:
        with self.store.lock:
            self._free.append(index)
            self.store.wake_main.notify_all()

    def check_conserved(self) -> None:
        """When idle: every buffer is back."""
        assert sorted(self._free) == list(range(len(self.buffers))), "gradient buffers leaked"


class Downloads:
    """The lane that gradients leave on. Holds their device tensors until the copy has ended, and
    never more than `limit` bytes of them: the device budget is hard."""

    def __init__(self, lane: Lane, limit: int) -> None:
        self.lane = lane
        self.limit = limit
        self._held: deque[tuple[Mark, list[Tensor]]] = deque()
        # Whole allocations count: the gradient of one expert keeps that of its wave alive.
        self._users: Counter[int] = Counter()
        self._bytes = 0

    def send(self, pairs: Sequence[tuple[Tensor, Tensor]], name: str, after: Mark) -> Mark:
        sources = [source for _, source in pairs]
        self._count(sources, 1)
        while self._held and (self._held[0][0].done() or self._bytes > self.limit):
            self._release()
        mark = self.lane.copy(pairs, name, after=[after])
        self._held.append((mark, sources))
        return mark

    def _release(self) -> None:
        mark, sources = self._held.popleft()
        mark.wait()
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
        while self._held:
            self._release()
