"""Either uploader over a small store, with copies that a test controls."""

import threading
import time

import pytest

from overspill.tiers.slab import device_slab
from overspill.tiers.store import Entry, ExpertStore, Part
from overspill.transfer.native_uploader import NativeUploader
from overspill.transfer.streams import Inject
from overspill.transfer.thread_uploader import ThreadUploader
from overspill.transfer.upload_thread import upload_library
from overspill.transfer.uploader import PieceSizes, Target, Uploader
from tests.transfer.fake_calls import FakeCalls
from tests.transfer.fakes import CPU, LAYOUT, GatedStream, host_store
from tests.waiting import wait_until

needs_compiler = pytest.mark.skipif(upload_library() is None, reason="no C++ compiler")
KINDS = ["thread", pytest.param("native", marks=needs_compiler)]
RECORD = LAYOUT.weight_bytes
HALVES = PieceSizes(piece=RECORD // 2, align=64, certain_in_flight=3 * RECORD)


class Bench:
    """An uploader over one layer of experts, whose copies end when the test says so."""

    def __init__(
        self,
        kind: str,
        experts: int,
        slots: int,
        sizes: PieceSizes | None = None,
        at_once: bool = True,
        inject: Inject | None = None,
        store: ExpertStore | None = None,
    ) -> None:
        self.store = store or host_store(experts)
        self.slab = device_slab(slots, RECORD, CPU)
        self.stream = GatedStream("upload", inject, at_once)
        self.calls = FakeCalls(at_once)
        self.native = kind == "native"
        self.uploader: Uploader
        if self.native:
            args = self.store, self.slab, self.stream, slots, self.calls, sizes
            self.uploader = NativeUploader(*args)
        else:
            self.uploader = ThreadUploader(self.store, self.slab, self.stream, slots, sizes)

    def entry(self, expert: int) -> Entry:
        return self.store.places.entries[expert]

    def target(self, *pairs: tuple[int, int], certain: bool = False) -> None:
        with self.store.sync.lock:
            self.uploader.set_targets(
                [Target(self.entry(e), slot, "by test", certain) for e, slot in pairs]
            )

    def is_issued(self, expert: int, slot: int) -> bool:
        with self.store.sync.lock:
            return self.uploader.is_issued(self.entry(expert), slot)

    def wait_issued(self, *pairs: tuple[int, int]) -> None:
        self.uploader.wait_issued([(self.entry(e), slot) for e, slot in pairs], every=True)
        assert all(self.is_issued(*pair) for pair in pairs)

    def issued(self, count: int) -> list[int]:
        """The expert of every piece that was issued, a moment after there are `count`: one too many
        would be seen."""
        wait_until(lambda: len(self._sources) >= count)
        time.sleep(0.01)
        first = self.store.host(self.entry(0), Part.WEIGHTS).data_ptr()
        return [(source - first) // RECORD for source in self._sources]

    @property
    def _sources(self) -> list[int]:
        return list(self.calls.sources if self.native else self.stream.sources)

    def arrive(self) -> None:
        """The oldest piece in flight arrives."""
        if self.native:
            self.calls.arrive()
        else:
            self.stream.arrive()

    @property
    def in_flight(self) -> int:
        return len(self.calls.work) // 2 if self.native else self.stream.in_flight

    def drain(self) -> None:
        """Pieces arrive until every upload that is possible now was issued and has arrived."""
        issues = threading.Thread(target=self.uploader.wait_idle)
        issues.start()
        while issues.is_alive() or self.in_flight:
            if self.in_flight:
                self.arrive()
            else:
                issues.join(1e-3)

    def holds(self, slot: int, value: int) -> bool:
        for event in self.uploader.end_events([slot]):
            event.wait()
        return bool((self.slab[slot] == value).all())

    def close(self) -> None:
        self.target()
        self.drain()
        self.uploader.close()
        self.store.close()
        assert not [t for t in threading.enumerate() if t.name == "overspill-uploader"]
