"""Initial weights of experts: a pure function of (seed, layer, index), one record at a time.

An expert has the same weights on one device whether it is created in place among its neighbours or
later, straight into the tier where it will live.
"""

import math

import torch
from torch import Tensor

from overspill.core.experts import ExpertId, ExpertShape

STD = 0.02
_MIX = 1_000_003  # a prime above any number of layers or experts: no two experts share a seed


def expert_generator(seed: int, expert: ExpertId, device: torch.device) -> torch.Generator:
    """The random numbers of one expert."""
    mixed = (seed * _MIX + expert.layer + 1) * _MIX + expert.index
    return torch.Generator(device).manual_seed(mixed % 2**63)


def out_std(n_layers: int) -> float:
    """For matrices that write into the residual stream: 2 * n_layers of them add up."""
    return STD / math.sqrt(2 * n_layers)


@torch.no_grad()
def init_expert_(
    record: Tensor, shape: ExpertShape, n_layers: int, generator: torch.Generator
) -> None:
    """Fills a flat record [numel] (longer ones keep their padding) in place."""
    record[: shape.in_numel].normal_(0.0, STD, generator=generator)
    record[shape.in_numel : shape.numel].normal_(0.0, out_std(n_layers), generator=generator)
