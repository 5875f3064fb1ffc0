"""Experts of other ranks: read when their owner has published the version of the pass."""

from types import SimpleNamespace
from typing import Any

import torch

from overspill.core.experts import ExpertId
from overspill.tiers.layout import ALIGN
from overspill.tiers.remote_experts import RemoteExpert
from overspill.tiers.slab import HostSlab


def test_a_remote_expert_is_readable_once_its_owner_has_updated_it() -> None:
    slab = HostSlab("weights", 2, ALIGN, pinned=False)
    owner: Any = SimpleNamespace(versions=torch.zeros(2, dtype=torch.int64))
    remote = RemoteExpert(ExpertId(0, 5), owner, slab, 1)
    assert remote.readable
    remote.version = 1  # published for a pass
    owner.versions[0] = 1  # of another expert
    assert not remote.readable
    owner.versions[1] = 1
    assert remote.readable
    assert remote.weights.data_ptr() == slab[1].data_ptr()
    remote.version = 2
    assert not remote.readable
    slab.close()
