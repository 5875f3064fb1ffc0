"""Initial weights of experts. They depend on seed, layer, index and device, not on the order in
which experts are created."""

import math

import torch
from torch import Tensor

from overspill.core.experts import ExpertId, ExpertShape

STD = 0.02
_MIX = 1_000_003  # a prime above any number of layers or experts, so that seeds are distinct


def expert_generator(seed: int, expert: ExpertId, device: torch.device) -> torch.Generator:
    """The random generator of one expert."""
    mixed = (seed * _MIX + expert.layer + 1) * _MIX + expert.index
    return torch.Generator(device).manual_seed(mixed % 2**63)


def out_std(n_layers: int) -> float:
    """Standard deviation of the 2 * n_layers matrices whose outputs join the residual stream."""
    return STD / math.sqrt(2 * n_layers)


@torch.no_grad()
def init_expert_(
    record: Tensor, shape: ExpertShape, n_layers: int, generator: torch.Generator
) -> None:
    """Fill a flat record, except its padding, in place."""
    record[: shape.in_numel].normal_(0.0, STD, generator=generator)
    record[shape.in_numel : shape.numel].normal_(0.0, out_std(n_layers), generator=generator)
