"""Reads experts from disk for a decoding step, which waits for them."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from overspill.core.errors import DiskError
from overspill.core.experts import ExpertId
from overspill.core.sizes import round_up
from overspill.tiers.entry import Entry, Part
from overspill.tiers.layout import ALIGN
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import Inject

_WORKERS = 8
_PIECE = 1 << 20
"""Bytes that a thread reads at once, at least: one expert alone should use the whole disk."""
_LANE = "ssd read"


class _Piece(NamedTuple):
    entry: Entry
    first: int
    stop: int


class DiskReads:
    """Brings experts into host slots and keeps them there while the CPU computes with them. Used
    by one thread. Nothing is read ahead."""

    def __init__(self, store: ExpertStore, recorder: Recorder, inject: Inject | None) -> None:
        self._store = store
        self._recorder = recorder
        self._inject = inject
        self._pool = ThreadPoolExecutor(_WORKERS, "overspill-disk-read")
        self._held: list[Entry] = []

    def hold(self, layer: int, experts: Sequence[int]) -> list[int]:
        """The addresses of the weights of these experts, by their ids, in host memory: valid until
        `release`."""
        entries = [self._store.entry(ExpertId(layer, expert)) for expert in experts]
        missing = self._store.hold_slots(entries)
        while missing is None:  # another read has begun that ends soon
            time.sleep(1e-4)
            missing = self._store.hold_slots(entries)
        self._held = entries
        try:
            self._read(missing)
        except BaseException:
            self._store.cancel_reads(missing)
            self.release()
            raise
        self._store.end_reads(missing)
        return [self._store.host(entry, Part.WEIGHTS).data_ptr() for entry in entries]

    def _read(self, missing: Sequence[Entry]) -> None:
        size = self._store.part_bytes(Part.WEIGHTS)
        step = max(_PIECE, round_up(-(-size // _WORKERS), ALIGN))
        pieces = [
            _Piece(entry, first, min(size, first + step))
            for entry in missing
            for first in range(0, size, step)
        ]
        # all of them, also after a failure: none may write to a slot that is given away
        failures = [failure for failure in self._pool.map(self._read_piece, pieces) if failure]
        for entry, error in failures:
            if not isinstance(error, OSError):
                raise error
            name = f"expert {entry.id.layer}.{entry.id.index}"
            raise DiskError(f"{name} could not be read from disk: {error}") from error

    def _read_piece(self, piece: _Piece) -> tuple[Entry, BaseException] | None:
        entry, first, stop = piece
        file, memory = self._store.files[Part.WEIGHTS], self._store.host(entry, Part.WEIGHTS)
        assert entry.disk_slot is not None
        label = f"{Part.WEIGHTS.name} {entry.id.layer}.{entry.id.index}"
        try:
            if self._inject is not None and first == 0:
                self._inject(_LANE)
            self._recorder.add_bytes(_LANE, stop - first)
            with self._recorder.span(_LANE, label, stop - first):
                file.read(entry.disk_slot, memory[first:stop], first)
        except BaseException as error:
            return entry, error
        return None

    def release(self) -> None:
        """The experts may leave host memory again."""
        held, self._held = self._held, []
        self._store.release_slots(held)

    def close(self) -> None:
        self._pool.shutdown()
