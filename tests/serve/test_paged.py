"""Attention over blocks against attention over whole sequences."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.models.attention_cache import AttentionOptions
from overspill.serve.paged import Layout, PagedCache, Span

CPU = torch.device("cpu")
SIZE = 4
BLOCKS = [[5, 2, 7], [1], [3, 6]]  # block 0 is another request's
LENGTHS = [11, 2, 6]


def packed(seed: int, heads: int, lengths: list[int]) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(length, heads, 8, generator=random) for length in lengths]


def attend(counts: list[int], window: int | None, poison: bool = False) -> list[Tensor]:
    """The sequences in passes: all but the last `counts` tokens first, then those."""
    cache = PagedCache(8, SIZE)
    q, k, v = packed(0, 4, LENGTHS), packed(1, 2, LENGTHS), packed(2, 2, LENGTHS)
    options = AttentionOptions(window=window)
    first = [length - count for length, count in zip(LENGTHS, counts, strict=True)]
    if poison:
        cache.begin(Layout([Span([0], 0, SIZE)], SIZE, CPU))
        bad = torch.full((SIZE, 2, 8), math.nan)
        cache.attend(0, torch.zeros(SIZE, 4, 8), bad, bad, options)
    out: list[Tensor] = []
    for begins, ends in (([0, 0, 0], first), (first, LENGTHS)):
        chosen = [n for n in range(3) if ends[n] > begins[n]]
        spans = [Span(BLOCKS[n], begins[n], ends[n] - begins[n]) for n in chosen]
        cache.begin(Layout(spans, SIZE, CPU))
        rows = [torch.cat([t[n][begins[n] : ends[n]] for n in chosen]) for t in (q, k, v)]
        out = list(cache.attend(0, *rows, options).split([span.count for span in spans]))
    return out


def expected(count: int, number: int, window: int | None) -> Tensor:
    q, k, v = (packed(seed, heads, LENGTHS)[number] for seed, heads in ((0, 4), (1, 2), (2, 2)))
    at = torch.arange(LENGTHS[number])
    sees = at[None] <= at[:, None]
    if window is not None:
        sees &= at[None] > at[:, None] - window
    k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
    y = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v)), attn_mask=sees)
    return y.transpose(0, 1)[-count:]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("counts", [[1, 1, 1], [5, 1, 3], [1, 1, 5], [10, 1, 2]])
@pytest.mark.parametrize("poison", [False, True])
def test_sequences_in_blocks_attend_to_themselves_alone(
    counts: list[int], window: int | None, poison: bool
) -> None:
    """Also if another request has left NaN in the first block."""
    for number, got in enumerate(attend(counts, window, poison)):
        want = expected(counts[number], number, window)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
