"""Experts of other ranks: read when their owner has published the version of the pass."""

from types import SimpleNamespace
from typing import Any

import torch

from overspill.core.experts import ExpertId
from overspill.tiers.guests import Guest
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab


def test_a_guest_is_readable_once_its_owner_has_updated_it() -> None:
    slab = HostSlab("weights", 2, ALIGN, pinned=False)
    owner: Any = SimpleNamespace(versions=torch.zeros(2, dtype=torch.int64))
    guest = Guest(ExpertId(0, 5), owner, slab, 1)
    assert guest.readable
    guest.version = 1  # announced for a pass
    owner.versions[0] = 1  # of another expert
    assert not guest.readable
    owner.versions[1] = 1
    assert guest.readable
    assert guest.weights.data_ptr() == slab[1].data_ptr()
    guest.version = 2
    assert not guest.readable
    slab.close()
