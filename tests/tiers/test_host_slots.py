"""Host slots of the store against a model of them, under any sequence of calls."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertShape
from overspill.tiers.entry import Entry, Part
from overspill.tiers.layout import RecordLayout
from overspill.tiers.store import ExpertStore

LAYOUT = RecordLayout(ExpertShape(8, 4, gated=False), torch.float32)
N_EXPERTS, HOME, CACHE = 6, 1, 3
UPDATED = Part.WEIGHTS | Part.STATES
NONE = Part(0)
parts = st.sampled_from(list(Part))
experts = st.integers(0, N_EXPERTS - 1)


class Copy:
    """A copy out of a host slot."""

    def __init__(self) -> None:
        self.ended = False

    def done(self) -> bool:
        return self.ended


@dataclass
class Model:
    """What the store should say about one expert on disk."""

    slot: bool = False
    valid: Part = NONE
    dirty: Part = NONE
    io: Part = NONE
    writing: bool = False
    holds: int = 0
    stale: bool = False
    copy: Copy | None = None

    @property
    def evictable(self) -> bool:
        copying = self.copy is not None and not self.copy.ended
        return self.slot and not (self.dirty or self.io or self.holds or copying)


class HostSlots(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        whole = ExpertMap.whole(N_EXPERTS)
        path = Path(self.folder.name)
        self.store = ExpertStore(1, whole, LAYOUT, HOME, CACHE, False, path, watchdog_seconds=5)
        self.changes = 0
        self.store.on_change(self._count_change)
        for part in (Part.STATES, Part.GRADS):
            self.store.allocate(part)
        on_disk = [entry for entry in self.store.entries if entry.disk_slot is not None]
        self.models = {entry: Model() for entry in on_disk}
        self.uses: list[Entry] = []  # least recently used first

    def _count_change(self) -> None:
        self.changes += 1

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    def pick(self, number: int) -> tuple[Entry, Model]:
        entry = list(self.models)[number % len(self.models)]
        return entry, self.models[entry]

    def use(self, entry: Entry) -> None:
        if entry in self.uses:
            self.uses.remove(entry)
        self.uses.append(entry)

    @rule(number=experts)
    def touch(self, number: int) -> None:
        entry, model = self.pick(number)
        if model.slot:
            self.store.touch(entry)
            self.use(entry)

    @rule(number=experts, needed=st.sets(experts, max_size=3))
    def assign(self, number: int, needed: set[int]) -> None:
        entry, model = self.pick(number)
        if model.slot:
            return
        kept = [self.pick(other)[0] for other in needed]
        free = CACHE - sum(other.slot for other in self.models.values())
        victims = [e for e in self.uses if self.models[e].evictable and e not in kept]
        assert self.store.assign_host_slot(entry, kept) == bool(free or victims)
        if not free and not victims:
            return
        if not free:
            stale = self.models[victims[0]].stale
            self.models[victims[0]] = Model(stale=stale)
            self.uses.remove(victims[0])
        model.slot, model.valid = True, NONE
        self.use(entry)

    @rule(number=experts)
    def hold(self, number: int) -> None:
        entry, model = self.pick(number)
        if model.slot:
            self.store.hold(entry)
            model.holds += 1

    @rule(number=experts)
    def release(self, number: int) -> None:
        entry, model = self.pick(number)
        if model.holds:
            before = self.changes
            self.store.release(entry)
            model.holds -= 1
            assert self.changes == before + 1, "a slot may be free now"

    @rule(number=experts, part=parts)
    def begin_read(self, number: int, part: Part) -> None:
        entry, model = self.pick(number)
        if model.slot and not model.io and not model.valid & part:
            self.store.begin_io(entry, part, write=False)
            model.io, model.writing = part, False

    @rule(number=experts)
    def begin_write(self, number: int) -> None:
        entry, model = self.pick(number)
        if model.dirty and not model.io:
            part = next(part for part in Part if model.dirty & part)
            self.store.begin_io(entry, part, write=True)
            model.io, model.writing = part, True
            model.dirty &= ~part

    @rule(number=experts)
    def end_io(self, number: int) -> None:
        entry, model = self.pick(number)
        if model.io:
            before = self.changes
            self.store.end_io(entry, model.io, model.writing)
            if not model.writing:
                model.valid |= model.io
            model.io = NONE
            assert self.changes == before + 1

    @rule(number=experts)
    def issue_upload(self, number: int) -> None:
        entry, model = self.pick(number)
        if model.valid & Part.WEIGHTS and not model.stale:
            self.store.begin_upload(entry)
            assert not entry.evictable, "the copy is being issued"
            model.copy = Copy()
            self.store.end_upload(entry, model.copy)

    @rule(number=experts)
    def end_upload(self, number: int) -> None:
        entry, model = self.pick(number)
        if model.copy is not None:
            before = self.changes
            model.copy.ended = True
            self.store.upload_done(entry)
            assert self.changes == before + 1

    @rule(number=experts)
    def begin_update(self, number: int) -> None:
        entry, model = self.pick(number)
        version = entry.version
        self.store.begin_update(entry)
        model.stale = True
        assert entry.version == version + 1

    @rule(number=experts)
    def end_update(self, number: int) -> None:
        entry, model = self.pick(number)
        if model.stale and not model.io and not UPDATED & ~model.valid:
            self.store.end_update(entry)
            model.stale = False
            model.dirty = (model.dirty | UPDATED) & ~Part.GRADS
            model.valid &= ~Part.GRADS

    @rule(number=experts)
    def keep_gradient(self, number: int) -> None:
        entry, model = self.pick(number)
        if model.slot and not model.io:
            self.store.keep_gradient(entry)
            model.valid |= Part.GRADS
            model.dirty |= Part.GRADS

    @precondition(lambda self: not any(model.io for model in self.models.values()))
    @rule(kept=st.sets(experts))
    def discard(self, kept: set[int]) -> None:
        self.store.discard_gradients(kept)
        for entry, model in self.models.items():
            if not model.holds:
                model.stale = False
            if entry.number in kept:
                model.valid &= ~Part.GRADS
                model.dirty &= ~Part.GRADS

    @invariant()
    def every_entry_is_as_in_the_model(self) -> None:
        if not hasattr(self, "models"):
            return
        for entry, model in self.models.items():
            assert (entry.host_slot is not None) == model.slot
            assert (entry.valid, entry.dirty, entry.io) == (model.valid, model.dirty, model.io)
            assert entry.stale == model.stale
            assert entry.readable == (not model.stale and bool(model.valid & Part.WEIGHTS))
            assert not model.slot or entry.evictable == model.evictable
        assert set(self.store.cached()) == {e for e, model in self.models.items() if model.slot}
        held = [entry.host_slot for entry in self.store.entries if entry.host_slot is not None]
        assert len(held) == len(set(held)) <= HOME + CACHE
        if not any(model.io or model.holds for model in self.models.values()):
            self.store.check_conserved()


HostSlots.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostSlots = HostSlots.TestCase
