"""Host slots of decoding steps: held until they are released, also if too few are free."""

from pathlib import Path

from overspill.tiers.decoding_slots import DecodingSlots
from tests.tiers.test_store import new_store


def test_experts_that_do_not_fit_are_not_held(tmp_path: Path) -> None:
    store = new_store((1, 4, 0, 2), tmp_path)
    slots, entries = DecodingSlots(store), list(store.places.entries)
    assert slots.hold(entries[:3]) is None
    assert [entry.holds for entry in entries] == [0, 0, 0, 0]
    store.places.check_conserved()
    for pair in (entries[:2], entries[2:]):  # each takes both slots
        missing = slots.hold(pair)
        assert missing == pair
        assert slots.hold(entries) is None, "all slots are in use"
        slots.end_reads(pair)
        assert slots.hold(pair) == [], "they are there"
        for _ in range(2):
            slots.release(pair)
        store.places.check_conserved()
    store.close()
