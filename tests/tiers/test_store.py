"""The store: Every expert is in exactly one place, and every host slot exactly one holder."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overspill.core.errors import DiskError, EngineError, OrderError
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertId, ExpertShape
from overspill.core.interrupt import Condition
from overspill.tiers.decoding_slots import DecodingSlots
from overspill.tiers.entry import Part
from overspill.tiers.layout import ALIGN, RecordLayout
from overspill.tiers.resident_changes import ResidentChanges
from overspill.tiers.store import ExpertStore
from tests.tiers.mixed import mixed_layout
from tests.waiting import wait_until

LAYOUT = RecordLayout(ExpertShape(8, 4, gated=False), torch.float32)
Split = tuple[int, int, int, int]


def new_store(split: Split, folder: Path, watchdog: float = 60.0) -> ExpertStore:
    layers, experts, permanent, cache = split
    return ExpertStore(
        layers,
        ExpertMap.whole(experts),
        LAYOUT,
        permanent,
        cache,
        False,
        folder,
        watchdog_seconds=watchdog,
    )


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """(layers, experts, permanent host slots, cache slots)."""
    layers, experts = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    permanent = draw(st.integers(0, layers * experts + 2))
    cache = draw(st.integers(1, layers * experts + 2))
    return layers, experts, permanent, cache


@settings(max_examples=40)
@given(splits())
def test_every_expert_has_one_place_and_residents_are_spread_evenly(split: Split) -> None:
    layers, experts, permanent, _ = split
    with tempfile.TemporaryDirectory() as folder:
        store = new_store(split, Path(folder))
        store.places.check_conserved()
        assert [
            store.places.entry(entry.id) for entry in store.places.entries
        ] == store.places.entries
        assert [
            e for layer in range(layers) for e in store.places.layer_entries(layer)
        ] == store.places.entries
        assert len({entry.id for entry in store.places.entries}) == layers * experts
        in_host = [entry for entry in store.places.entries if entry.disk_slot is None]
        on_disk = [entry for entry in store.places.entries if entry.disk_slot is not None]
        assert len(in_host) == store.places.permanent_slots == min(permanent, layers * experts)
        assert sorted(entry.host_slot for entry in in_host) == list(range(len(in_host)))
        assert sorted(entry.disk_slot for entry in on_disk) == list(range(store.places.disk_slots))
        assert all(entry.host_slot is None and not entry.valid for entry in on_disk)
        assert all(entry.readable for entry in in_host)
        residents = [sum(entry.id.layer == layer for entry in in_host) for layer in range(layers)]
        assert max(residents) - min(residents) <= 1
        slots = store.places.permanent_slots + store.places.cache_slots
        assert store.memory.host_bytes == slots * LAYOUT.weight_bytes
        assert store.memory.disk_bytes == store.places.disk_slots * LAYOUT.weight_bytes
        store.close()
        assert not list(Path(folder).iterdir())


@settings(max_examples=15)
@given(splits(), st.randoms(use_true_random=False))
def test_bytes_written_to_an_expert_are_read_from_it_alone(split: Split, random: Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = new_store(split, Path(folder))
        store.allocate(Part.STATES)
        entries = list(store.places.entries)
        random.shuffle(entries)
        for entry in entries:
            for part in (Part.WEIGHTS, Part.STATES):
                write = store.set_part if random.random() < 0.5 else store.write_part
                write(entry, part, lambda memory, e=entry, p=part: memory.fill_(e.number * 4 + p))
        for entry in store.places.entries:
            for part in (Part.WEIGHTS, Part.STATES):
                assert (store.read_part(entry, part) == entry.number * 4 + part).all()
        store.close()


@st.composite
def mixed_stores(draw: st.DrawFn) -> tuple[list[int], int, list[int], int, int, int]:
    """(pages of a record of each layer, experts of a layer, residents of each layer, permanent host
    slots, cache slots, spare records)."""
    experts = draw(st.integers(1, 5))
    pages = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    residents = [draw(st.integers(0, experts)) for _ in pages]
    permanent = draw(st.integers(0, len(pages) * experts))
    return pages, experts, residents, permanent, draw(st.integers(1, 4)), draw(st.integers(0, 3))


@settings(max_examples=60)
@given(mixed_stores(), st.randoms(use_true_random=False))
def test_records_take_the_bytes_of_their_layer_and_keep_them_wherever_they_move(
    case: tuple[list[int], int, list[int], int, int, int], random: Random
) -> None:
    pages, experts, residents, permanent, cache, spare = case
    layout, whole = mixed_layout(pages), ExpertMap.whole(experts)
    with tempfile.TemporaryDirectory() as folder:
        store = ExpertStore(
            len(pages), whole, layout, permanent, cache, False, Path(folder),
            residents=list(residents), spare_records=spare,
        )  # fmt: skip
        places, changes = store.places, ResidentChanges(store)
        streamed = [e for e in places.entries if e.host_slot is not None or e.on_disk]

        def own_bytes(on_disk: bool) -> int:
            return sum(pages[e.id.layer] for e in streamed if e.on_disk == on_disk) * ALIGN

        others = places.least_cache, places.disk_slots - places.on_disk
        sizes = [other * layout.weight_bytes for other in others]
        assert store.memory.host_bytes == own_bytes(on_disk=False) + sizes[0]
        assert store.memory.disk_bytes == own_bytes(on_disk=True) + sizes[1]

        def filled(number: int) -> Callable[[Tensor], None]:
            def fill(memory: Tensor) -> None:
                memory.fill_(number + 1)

            return fill

        on_device = {e.number for e in places.entries} - {e.number for e in streamed}
        for entry in streamed:
            store.set_part(entry, Part.WEIGHTS, filled(entry.number))
        for _ in range(12):
            cached = [e for e in places.entries if e.on_disk and e.number not in on_device]
            if cached and random.random() < 0.5:  # also as newer than on disk
                entry = random.choice(cached)
                assert (changes.load_weights(entry) == entry.number + 1).all()
                entry.dirty |= Part.WEIGHTS if random.random() < 0.5 else Part(0)
            layer, count = random.randrange(len(pages)), random.randint(0, experts)
            before = places.residents[layer]
            leaving = places.layer_entries(layer)[count:before]
            if leaving:
                changes.empty_cache()
                changes.extend_host(changes.missing_slots(leaving))
                for entry in reversed(leaving):
                    changes.enter_host(entry, {Part.WEIGHTS: filled(entry.number)})
                    on_device.discard(entry.number)
            elif count > before:
                for entry in places.layer_entries(layer)[before:count]:
                    assert (store.read_part(entry, Part.WEIGHTS) == entry.number + 1).all()
                    on_device.add(entry.number)
                changes.leave_host(layer, count)
            places.recount_slots()
            places.check_conserved()
            for entry in places.entries:
                if entry.number not in on_device:
                    weights = store.read_part(entry, Part.WEIGHTS)
                    assert len(weights) == pages[entry.id.layer] * ALIGN
                    assert (weights == entry.number + 1).all()
        store.close()


def test_a_store_of_some_experts_knows_them_by_their_global_ids(tmp_path: Path) -> None:
    experts = ExpertMap.of(6, [4, 1])
    store = ExpertStore(2, experts, LAYOUT, 4, 0, False)
    assert [tuple(entry.id) for entry in store.places.entries] == [(0, 1), (0, 4), (1, 1), (1, 4)]
    entry = store.places.entry(ExpertId(1, 4))
    assert store.places.at(1, 1) is entry
    assert store.places.position(entry) == 1
    with pytest.raises(KeyError):
        store.places.entry(ExpertId(0, 2))
    store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ExpertStore]:
    """Two layers of three experts: two in host memory, the others through two cache slots."""
    store = new_store((2, 3, 2, 2), tmp_path)
    yield store
    store.close()


def test_memory_of_a_part_is_allocated_once(store: ExpertStore) -> None:
    before = store.memory.host_bytes, store.memory.disk_bytes
    store.allocate(Part.WEIGHTS)
    assert (store.memory.host_bytes, store.memory.disk_bytes) == before
    store.allocate(Part.STATES)
    assert store.memory.host_bytes == before[0] + 4 * LAYOUT.state_bytes
    assert store.memory.disk_bytes == before[1] + 4 * LAYOUT.state_bytes


def test_writing_weights_makes_the_copy_on_the_gpu_out_of_date(store: ExpertStore) -> None:
    entry = store.places.entry(ExpertId(1, 1))
    version = entry.version
    store.write_part(entry, Part.WEIGHTS, lambda memory: memory.fill_(1))
    assert entry.version == version + 1


def test_an_update_hides_the_weights_until_it_has_ended(store: ExpertStore) -> None:
    entry = next(entry for entry in store.places.entries if entry.disk_slot is None)
    version = entry.version
    store.begin_update(entry)
    assert not entry.readable
    assert entry.version == version + 1
    store.end_update(entry)
    assert entry.readable
    assert not entry.dirty, "it has no place on disk"


def test_dropped_gradients_make_the_weights_current_again(store: ExpertStore) -> None:
    kept, held = (entry for entry in store.places.entries if entry.disk_slot is None)
    for entry in (kept, held):
        store.begin_update(entry)
    store.hold(held)  # by a backward that was interrupted
    store.discard_gradients({kept.number})
    assert kept.readable
    assert held.readable
    store.places.check_conserved()


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    stores = [new_store((1, 2, 0, 1), tmp_path) for _ in range(2)]
    for number, store in enumerate(stores):
        store.write_part(store.places.entries[0], Part.WEIGHTS, lambda m, n=number: m.fill_(n + 1))
    for number, store in enumerate(stores):
        assert (store.read_part(store.places.entries[0], Part.WEIGHTS) == number + 1).all()
        store.close()
    assert not list(tmp_path.iterdir())


def test_what_is_in_use_is_not_idle(store: ExpertStore) -> None:
    entry = store.places.entries[0]
    store.hold(entry)
    with pytest.raises(AssertionError, match="not idle"):
        store.places.check_conserved()
    store.release(entry)
    store.disk.begin_io(entry, Part.WEIGHTS, write=False)
    with pytest.raises(AssertionError, match="not idle"):
        store.places.check_conserved()
    store.disk.end_io(entry, Part.WEIGHTS, write=False)
    store.places.check_conserved()


# -- waiting and failing ------------------------------------------------------------------------


def test_a_waiting_thread_raises_the_first_failure(store: ExpertStore) -> None:
    threading.Timer(0.05, store.sync.fail, [ValueError("first")]).start()
    with pytest.raises(EngineError, match="first") as caught:
        store.sync.wait(lambda: False, "an upload")
    assert isinstance(caught.value.__cause__, ValueError)
    store.sync.fail(ValueError("second"))
    with pytest.raises(EngineError, match="first"):
        store.sync.raise_error()


def test_an_error_for_the_user_is_raised_as_it_is(store: ExpertStore) -> None:
    store.sync.fail(DiskError("the disk is gone"))
    with pytest.raises(DiskError, match="the disk is gone"):
        store.sync.raise_error()


def test_the_watchdog_names_what_was_waited_for(tmp_path: Path) -> None:
    store = new_store((1, 2, 2, 1), tmp_path, watchdog=0.05)
    with pytest.raises(EngineError, match=r"no progress .* the upload of expert 0\.1; .*threads"):
        store.sync.wait(lambda: False, "the upload of expert 0.1")
    store.close()


def test_the_watchdog_takes_every_change_for_progress(tmp_path: Path) -> None:
    store = new_store((1, 2, 2, 1), tmp_path, watchdog=0.1)
    looks = 0

    def ready() -> bool:
        nonlocal looks
        looks += 1
        if looks % 8 == 0:
            store.sync.wake_main()
        return looks == 80

    store.sync.wait(ready, "changes")  # takes four times as long as the watchdog allows
    assert looks == 80
    store.close()


def test_a_slow_disk_is_not_taken_for_a_hang(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store((1, 2, 0, 1), tmp_path, watchdog=0.05)
    entry = store.places.entries[0]
    assert store.places.assign_host_slot(entry, [])
    store.disk.begin_io(entry, Part.WEIGHTS, write=False)

    def ready() -> bool:
        if caplog.text.count("no disk transfer has ended") == 6 and not entry.readable:
            store.disk.end_io(entry, Part.WEIGHTS, False)
        return entry.readable

    store.sync.wait(ready, "a read")  # takes six times as long as the watchdog allows
    store.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = new_store((1, 2, 2, 1), tmp_path)
    store.lifetime.check()
    store.close()
    with pytest.raises(OrderError, match="closed"):
        store.lifetime.check()


def test_a_pass_that_waits_for_an_expert_which_a_decoding_step_reads_goes_on_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Condition, "LIMIT", 600.0)  # it does not look by itself
    store = new_store((1, 3, 1, 2), tmp_path, watchdog=12000.0)
    entry = next(entry for entry in store.places.entries if entry.disk_slot is not None)
    slots = DecodingSlots(store)
    assert slots.hold([entry]) == [entry]
    waits = threading.Thread(
        target=lambda: store.sync.wait(lambda: entry.readable, "a test"), daemon=True
    )
    waits.start()
    wait_until(lambda: store.sync.main_waits)
    slots.end_reads([entry])
    slots.release([entry])
    waits.join(60)
    assert not waits.is_alive()
    store.places.check_conserved()
    store.close()
