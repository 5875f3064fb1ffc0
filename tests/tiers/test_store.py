"""The store: every expert has exactly one home, every row exactly one holder."""

import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overspill.core.errors import DiskError, EngineError
from overspill.core.experts import ExpertId, ExpertShape
from overspill.tiers.layout import RecordLayout
from overspill.tiers.store import ExpertStore, Part

LAYOUT = RecordLayout(ExpertShape(8, 4, gated=False), torch.float32)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(layers, experts, home rows, cache rows)."""
    layers, experts = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    home = draw(st.integers(0, layers * experts + 2))
    cache = draw(st.integers(1, layers * experts + 2))
    return layers, experts, home, cache


@settings(max_examples=60)
@given(splits())
def test_every_expert_has_one_home_and_homes_are_spread_evenly(
    split: tuple[int, int, int, int],
) -> None:
    layers, experts, home, cache = split
    with tempfile.TemporaryDirectory() as folder:
        store = ExpertStore(layers, experts, LAYOUT, home, cache, False, Path(folder))
        store.check_conserved()
        assert [store.entry(entry.id) for entry in store.entries] == store.entries
        assert len({entry.id for entry in store.entries}) == layers * experts
        in_host = [entry for entry in store.entries if entry.disk_row is None]
        on_disk = [entry for entry in store.entries if entry.disk_row is not None]
        assert len(in_host) == store.home_rows == min(home, layers * experts)
        assert sorted(entry.row for entry in in_host) == list(range(len(in_host)))
        assert sorted(entry.disk_row for entry in on_disk) == list(range(store.disk_rows))
        assert all(entry.row is None and not entry.have for entry in on_disk)
        assert all(entry.have == Part.WEIGHTS for entry in in_host)
        homes = [sum(entry.id.layer == layer for entry in in_host) for layer in range(layers)]
        assert max(homes) - min(homes) <= 1
        rows = store.home_rows + store.cache_rows
        assert store.host_bytes() == rows * LAYOUT.weight_bytes
        assert store.disk_bytes() == store.disk_rows * LAYOUT.weight_bytes
        store.close()
        assert not list(Path(folder).iterdir())


@settings(max_examples=20)
@given(splits(), st.randoms(use_true_random=False))
def test_what_is_written_to_an_expert_is_read_from_it_alone(
    split: tuple[int, int, int, int], random: object
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = ExpertStore(*split[:2], LAYOUT, *split[2:], False, Path(folder))
        store.take(Part.STATES)
        entries = list(store.entries)
        random.shuffle(entries)  # type: ignore[attr-defined]
        for entry in entries:
            for part in (Part.WEIGHTS, Part.STATES):
                store.write_part(
                    entry, part, lambda row, e=entry, p=part: _fill(row, e.number * 4 + p)
                )
        for entry in store.entries:
            for part in (Part.WEIGHTS, Part.STATES):
                assert (store.read_part(entry, part) == entry.number * 4 + part).all()
        store.close()


def _fill(row: Tensor, value: int) -> None:
    row.fill_(value)


@pytest.fixture
def store(tmp_path: Path) -> ExpertStore:
    return ExpertStore(2, 3, LAYOUT, 2, 2, False, tmp_path)


def test_a_leaked_row_is_found(store: ExpertStore) -> None:
    store.check_conserved()
    row = store.free_rows.pop()
    with pytest.raises(AssertionError, match="leaked"):
        store.check_conserved()
    store.free_rows += [row, row]
    with pytest.raises(AssertionError, match="leaked"):
        store.check_conserved()
    store.free_rows.pop()
    store.entries[0].queued = 1
    with pytest.raises(AssertionError, match="not idle"):
        store.check_conserved()
    store.close()


def test_memory_of_a_part_is_taken_once(store: ExpertStore) -> None:
    before = store.host_bytes(), store.disk_bytes()
    store.take(Part.WEIGHTS)
    assert (store.host_bytes(), store.disk_bytes()) == before
    store.take(Part.STATES)
    assert store.host_bytes() == before[0] + 4 * LAYOUT.state_bytes
    assert store.disk_bytes() == before[1] + 4 * LAYOUT.state_bytes
    store.close()


def test_writing_weights_makes_what_is_on_the_device_old(store: ExpertStore) -> None:
    entry = store.entry(ExpertId(1, 1))
    version = entry.version
    store.write_part(entry, Part.WEIGHTS, lambda row: _fill(row, 1))
    assert entry.version == version + 1
    store.close()


def test_who_waits_hears_of_a_failure(store: ExpertStore) -> None:
    threading.Timer(0.05, store.fail, [ValueError("first")]).start()
    with store.lock, pytest.raises(EngineError, match="first") as caught:
        store.wait_main(lambda: False)
    assert isinstance(caught.value.__cause__, ValueError)
    store.fail(ValueError("second"))
    with pytest.raises(EngineError, match="first"):
        store.raise_error()
    store.close()


def test_an_error_for_the_user_is_passed_on_as_it_is(store: ExpertStore) -> None:
    store.fail(DiskError("the disk is gone"))
    with pytest.raises(DiskError, match="the disk is gone"):
        store.raise_error()
    store.close()


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    stores = [ExpertStore(1, 2, LAYOUT, 0, 1, False, tmp_path) for _ in range(2)]
    for number, store in enumerate(stores):
        store.write_part(store.entries[0], Part.WEIGHTS, lambda row, n=number: _fill(row, n + 1))
    for number, store in enumerate(stores):
        assert (store.read_part(store.entries[0], Part.WEIGHTS) == number + 1).all()
        store.close()
    assert not list(tmp_path.iterdir())
