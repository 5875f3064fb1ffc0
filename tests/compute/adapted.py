"""Records with low-rank matrices behind their weights, and naive products of them."""

import torch
from torch import Tensor

from overspill.tiers.layout import LowRanks, RecordLayout

RANKS = LowRanks(3, 12)
ONE_RANK = LowRanks(0, 5)


def adapted(layout: RecordLayout, records: Tensor, plain: Tensor) -> Tensor:
    """Bare records [n, ...] with random matrices behind them, whose products are about as large as
    the weights, `plain`. What is read nowhere is NaN."""
    scale = plain.float().std().sqrt()
    numel, dtype = layout.stored
    bare, _ = layout.bare
    stored = torch.full((len(records), numel), -1, dtype=torch.int8).view(torch.uint8)
    if dtype != torch.uint8:
        stored = torch.full((len(records), numel), torch.nan, dtype=dtype)
    stored[:, :bare] = records[:, :bare]
    for planes in layout.low_rank:
        if planes is not None:
            for part, rank_dim in zip(planes.of(layout.computed(stored)), (1, 2), strict=True):
                part.copy_(scale * torch.randn(part.shape))
                part.narrow(rank_dim, planes.rank, planes.padded - planes.rank).zero_()
    return stored


def low_rank_sum(
    layout: RecordLayout, stored: Tensor, expert: int, number: int, x: Tensor
) -> Tensor:
    """B @ (A @ x) of w_in or w_out in float64; zeros without them."""
    planes = layout.low_rank[number]
    if planes is None:
        return torch.zeros((), dtype=torch.float64)
    a, b = (part[expert].double() for part in planes.of(layout.computed(stored)))
    return x.double() @ a.T @ b.T
