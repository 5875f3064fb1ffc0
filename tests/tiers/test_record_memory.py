"""The memory of the parts of experts, whose host slots grow."""

import torch

from overspill.core.experts import ExpertShape
from overspill.tiers.entry import Part
from overspill.tiers.layout import RecordLayout
from overspill.tiers.record_memory import RecordMemory

LAYOUT = RecordLayout(ExpertShape(8, 4, gated=False), torch.float32)


def test_slots_that_an_interrupt_has_left_uncounted_are_used_later() -> None:
    """An interrupt came when one part had more slots, before the store counted them."""
    memory = RecordMemory(LAYOUT, 0, pinned=False, disk=None, progress=None)
    for part in (Part.WEIGHTS, Part.STATES):
        memory.allocate(part, 2, background=False)
    memory.slabs[Part.WEIGHTS].extend(3)
    for wanted, lengths in ((3, [5, 3]), (5, [5, 5]), (6, [6, 6])):
        memory.extend(wanted)
        assert [len(memory.slabs[part]) for part in (Part.WEIGHTS, Part.STATES)] == lengths
    assert memory.host_bytes == 6 * (LAYOUT.weight_bytes + LAYOUT.state_bytes)
    memory.close()
