"""Host slots of the store against a model of them, under any sequence of calls."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertShape
from overspill.tiers.decoding_slots import DecodingSlots
from overspill.tiers.entry import Entry, Part
from overspill.tiers.layout import RecordLayout
from overspill.tiers.store import ExpertStore

LAYOUT = RecordLayout(ExpertShape(8, 4, gated=False), torch.float32)
N_EXPERTS, HOME, CACHE = 6, 1, 3
UPDATED = Part.WEIGHTS | Part.STATES
NONE = Part(0)
experts = st.integers(0, N_EXPERTS - 1)


Step = Callable[["HostSlots", Entry, "Model"], None]


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
    upload: Copy | None = None
    copy: Copy | None = None
    in_step: bool = False

    @property
    def evictable(self) -> bool:
        copying = any(copy is not None and not copy.ended for copy in (self.upload, self.copy))
        used = self.dirty or self.io or self.holds or self.in_step or copying
        return self.slot and not used


def on(condition: Callable[[Model], bool]) -> Callable[[Step], Any]:
    """A rule for one of the experts that meet the condition."""

    def decorate(step: Step) -> Any:
        def run(self: "HostSlots", number: int) -> None:
            entries = [entry for entry, model in self.models.items() if condition(model)]
            step(self, *self.pick(number, entries))

        possible = precondition(lambda self: any(map(condition, self.models.values())))
        return possible(rule(number=experts)(run))

    return decorate


class HostSlots(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        whole = ExpertMap.whole(N_EXPERTS)
        path = Path(self.folder.name)
        self.store = ExpertStore(1, whole, LAYOUT, HOME, CACHE, False, path, watchdog_seconds=60)
        self.decoding = DecodingSlots(self.store)
        self.changes = 0
        self.store.disk.on_change(self._count_change)
        for part in (Part.STATES, Part.GRADS):
            self.store.allocate(part)
        on_disk = [entry for entry in self.store.places.entries if entry.disk_slot is not None]
        self.models = {entry: Model() for entry in on_disk}
        self.uses: list[Entry] = []  # least recently used first
        self.in_step: list[Entry] = []
        self.reading: list[Entry] = []  # of them

    def _count_change(self) -> None:
        self.changes += 1

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    def pick(self, number: int, among: list[Entry] | None = None) -> tuple[Entry, Model]:
        entries = list(self.models) if among is None else among
        entry = entries[number % len(entries)]
        return entry, self.models[entry]

    def use(self, entry: Entry) -> None:
        if entry in self.uses:
            self.uses.remove(entry)
        self.uses.append(entry)

    @on(lambda model: model.slot)
    def touch(self, entry: Entry, model: Model) -> None:
        self.store.places.touch(entry)
        self.use(entry)

    @precondition(lambda self: any(not model.slot for model in self.models.values()))
    @rule(number=experts, needed=st.sets(experts, max_size=2))
    def assign(self, number: int, needed: set[int]) -> None:
        entry, model = self.pick(number, [e for e, m in self.models.items() if not m.slot])
        kept = [self.pick(other)[0] for other in needed]
        free = CACHE - sum(other.slot for other in self.models.values())
        victims = [e for e in self.uses if self.models[e].evictable and e not in kept]
        assert self.store.places.assign_host_slot(entry, kept) == bool(free or victims)
        if not free and not victims:
            return
        if not free:
            stale = self.models[victims[0]].stale
            self.models[victims[0]] = Model(stale=stale)
            self.uses.remove(victims[0])
        model.slot, model.valid = True, NONE
        self.use(entry)

    @on(lambda model: model.slot and not model.holds)
    def hold(self, entry: Entry, model: Model) -> None:
        self.store.hold(entry)
        model.holds += 1

    @on(lambda model: model.holds > 0)
    def release(self, entry: Entry, model: Model) -> None:
        before = self.changes
        self.store.release(entry)
        model.holds -= 1
        assert self.changes == before + 1, "a slot may be free now"

    @on(lambda model: model.slot and not model.io and bool(UPDATED & ~model.valid))
    def read(self, entry: Entry, model: Model) -> None:
        part = next(part for part in Part if UPDATED & part & ~model.valid)
        self.store.disk.begin_io(entry, part, write=False)
        model.io, model.writing = part, False

    @on(lambda model: bool(model.dirty) and not model.io)
    def write(self, entry: Entry, model: Model) -> None:
        part = next(part for part in Part if model.dirty & part)
        self.store.disk.begin_io(entry, part, write=True)
        model.io, model.writing = part, True
        model.dirty &= ~part

    @on(lambda model: bool(model.io) and not model.in_step)
    def end_io(self, entry: Entry, model: Model) -> None:
        before = self.changes
        self.store.disk.end_io(entry, model.io, model.writing)
        if not model.writing:
            model.valid |= model.io
        model.io = NONE
        assert self.changes == before + 1

    @on(lambda model: bool(model.valid & Part.WEIGHTS) and not model.stale)
    def issue_upload(self, entry: Entry, model: Model) -> None:
        self.store.begin_upload(entry)
        assert not entry.evictable, "the copy is being issued"
        model.upload = Copy()
        self.store.end_upload(entry, model.upload)

    @on(lambda model: model.upload is not None and not model.upload.ended)
    def end_upload(self, entry: Entry, model: Model) -> None:
        before = self.changes
        assert model.upload is not None
        model.upload.ended = True
        self.store.upload_done(entry)
        assert self.changes == before + 1

    @on(lambda model: model.slot)
    def copy_for_steps(self, entry: Entry, model: Model) -> None:
        copy, readable = Copy(), not model.stale and bool(model.valid & Part.WEIGHTS)
        free = model.copy is None or model.copy.ended
        assert self.store.begin_copy(entry, copy) == (readable and free)
        if readable and free:
            model.copy = copy

    @on(lambda model: model.copy is not None and not model.copy.ended)
    def end_copy(self, entry: Entry, model: Model) -> None:
        assert model.copy is not None
        model.copy.ended = True

    @precondition(lambda self: not self.in_step)
    @rule(numbers=st.sets(experts, min_size=1, max_size=3))
    def begin_step(self, numbers: set[int]) -> None:
        chosen = {self.pick(number)[0]: None for number in numbers}
        found = self.decoding.hold([*chosen])
        models = [self.models[entry] for entry in chosen]
        if any(model.io or model.stale for model in models):
            assert found is None
            return
        for entry, model in zip(chosen, models, strict=True):
            model.in_step = True
            if model.slot:
                self.use(entry)
        missing = [entry for entry in chosen if not self.models[entry].valid & Part.WEIGHTS]
        if not all(self.has_slot(entry) for entry in missing):
            assert found is None
            for model in models:
                model.in_step = False
            for model in (self.models[entry] for entry in self.uses):
                if model.dirty and not model.io and not model.holds:
                    model.dirty = NONE
                    break
            return
        assert found == missing
        for entry in missing:
            self.models[entry].io, self.models[entry].writing = Part.WEIGHTS, False
        self.in_step, self.reading = list(chosen), missing

    def has_slot(self, entry: Entry) -> bool:
        """Gives the expert a slot, if there is one."""
        model = self.models[entry]
        if model.slot:
            return True
        if sum(other.slot for other in self.models.values()) == CACHE:
            victims = [e for e in self.uses if self.models[e].evictable]
            if not victims:
                return False
            self.models[victims[0]] = Model(stale=self.models[victims[0]].stale)
            self.uses.remove(victims[0])
        model.slot = True
        self.use(entry)
        return True

    @precondition(lambda self: self.in_step)
    @rule(succeeds=st.booleans())
    def end_step(self, succeeds: bool) -> None:
        self.decoding.end_reads(self.reading, succeeds)
        for entry in self.reading:
            self.models[entry].io &= ~Part.WEIGHTS
            if succeeds:
                self.models[entry].valid |= Part.WEIGHTS
        self.decoding.release(self.in_step)
        for entry in self.in_step:
            self.models[entry].in_step = False
        self.in_step, self.reading = [], []

    @on(lambda model: not model.stale)
    def begin_update(self, entry: Entry, model: Model) -> None:
        version = entry.version
        self.store.begin_update(entry)
        model.stale = True
        assert entry.version == version + 1

    @on(lambda model: model.stale and not model.io and not UPDATED & ~model.valid)
    def end_update(self, entry: Entry, model: Model) -> None:
        self.store.end_update(entry)
        model.stale = False
        model.dirty = (model.dirty | UPDATED) & ~Part.GRADS
        model.valid &= ~Part.GRADS

    @on(lambda model: model.slot and not model.valid & Part.GRADS)
    def keep_gradient(self, entry: Entry, model: Model) -> None:
        self.store.keep_gradient(entry)
        model.valid |= Part.GRADS
        model.dirty |= Part.GRADS

    @precondition(lambda self: not self.in_step)
    @precondition(lambda self: any(model.valid & Part.GRADS for model in self.models.values()))
    @rule(kept=st.sets(experts))
    def discard(self, kept: set[int]) -> None:
        self.store.discard_gradients(kept)
        for entry, model in self.models.items():
            model.stale, model.holds = False, 0
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
        assert set(self.store.places.cached()) == {
            e for e, model in self.models.items() if model.slot
        }
        held = [
            entry.host_slot for entry in self.store.places.entries if entry.host_slot is not None
        ]
        assert len(held) == len(set(held)) <= HOME + CACHE
        if not any(model.io or model.holds or model.in_step for model in self.models.values()):
            self.store.places.check_conserved()


HostSlots.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestHostSlots = HostSlots.TestCase
