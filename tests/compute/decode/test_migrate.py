"""Copies of experts of a later layer, in Triton's interpreter and on a GPU."""

from typing import Any

import pytest
import torch

from overspill.compute.decode.constants import ABSENT
from tests.compute.decode.near import needs_triton
from tests.compute.test_grouped_triton import every_device

pytestmark = needs_triton
LARGEST, EXPERTS, SLOTS = 5008, 4, 4


@pytest.fixture
def migration() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute.decode import migrate

    return migrate


@every_device
@pytest.mark.parametrize("numel", [LARGEST, 320])
def test_records_of_a_layer_are_copied_one_behind_the_other(
    migration: Any, numel: int, device: str
) -> None:
    """Also smaller ones than the region has room for."""
    pinned = torch.randint(0, 255, (EXPERTS, 2 * LARGEST), dtype=torch.uint8)
    pinned = pinned.pin_memory() if device == "cuda" else pinned
    base = torch.empty(64, dtype=torch.uint8, device=device)
    region = migration.new_region(SLOTS, EXPERTS, LARGEST, base)
    region.slots_ND.fill_(7)
    found = region.with_records(numel)
    width = -(-numel // 16) * 16
    assert found.slots_ND.shape == (SLOTS, width)
    assert found.slots_ND.data_ptr() == region.slots_ND.data_ptr()
    places = [record.data_ptr() - base.data_ptr() for record in pinned]
    table = torch.tensor([ABSENT, 64, ABSENT, ABSENT], device=device)
    ids = torch.tensor([[3, 1], [0, 3]], dtype=torch.int32, device=device)
    real = torch.ones(2, dtype=torch.int64, device=device)
    migration.migrate(found, ids, real, table, torch.tensor(places, device=device), base)
    first = region.slots_ND.data_ptr() - base.data_ptr()
    assert found.table_E.tolist() == [first, ABSENT, ABSENT, first + width]
    slots = region.slots_ND.view(-1).cpu()
    for slot, expert in enumerate((0, 3)):
        assert torch.equal(slots[slot * width :][:numel], pinned[expert, :numel])
    assert (slots[2 * width :] == 7).all()
