"""Attention over blocks against attention over whole sequences."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.models.attention_cache import AttentionOptions
from overspill.serve import paged
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


def naive(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of the last queries to all keys, head by head and query by query, in float64."""
    q, k, v = (t[0].double() for t in (q, k, v))
    (heads, n_queries, width), n_keys = q.shape, k.shape[1]
    out = q.new_empty(heads, n_queries, v.shape[-1])
    for head in range(heads):
        keys, values = (t[head * len(k) // heads] for t in (k, v))
        for row in range(n_queries):
            at = n_keys - n_queries + row
            first = 0 if options.window is None else max(0, at + 1 - options.window)
            scores = keys[first : at + 1] @ q[head, row] * (options.scale or width**-0.5)
            if options.softcap is not None:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            total = scores.exp().sum()
            if options.sinks is not None:
                total += options.sinks[head].double().exp()
            out[head, row] = (scores.exp() / total) @ values[first : at + 1]
    return out[None]


OPTIONS = {
    "plain": AttentionOptions(),
    "scaled": AttentionOptions(scale=0.3),
    "window": AttentionOptions(window=5),
    "softcap": AttentionOptions(softcap=2.0),
    "sinks": AttentionOptions(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "sinks and window": AttentionOptions(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), window=9),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("n_queries", [2, 13, 20])
def test_a_piece_of_a_prompt_is_attention_to_all_tokens_before_it(
    name: str, n_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if few scores are in memory at a time."""
    random = torch.Generator().manual_seed(n_queries)
    q = torch.randn(1, 4, n_queries, 8, generator=random)
    k, v = torch.randn(2, 1, 2, 20, 8, generator=random)
    expected = naive(q, k, v, OPTIONS[name])
    for most in (1, 1000, 1 << 28):
        monkeypatch.setattr(paged, "_SCORES", most)
        got = paged._attend_causally(q, k, v, OPTIONS[name])
        torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "widths"), [(2, (64, 64)), (4, (192, 128))])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(77, 77), (77, 300), (2, 513)])
def test_pieces_of_prompts_on_a_gpu(
    name: str, dtype: torch.dtype, heads: int, widths: tuple[int, int], n_queries: int, n_keys: int
) -> None:
    random = torch.Generator("cuda").manual_seed(n_queries)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=random, device="cuda", dtype=dtype)

    q, k = draw(4, n_queries, widths[0]), draw(heads, n_keys, widths[0])
    v = draw(heads, n_keys, widths[1])
    options = OPTIONS[name]
    if options.sinks is not None:
        options = options._replace(sinks=options.sinks.to("cuda", dtype))
    got = paged._attend_causally(q, k, v, options).cpu()
    cpu = options if options.sinks is None else options._replace(sinks=options.sinks.cpu())
    expected = naive(q.cpu(), k.cpu(), v.cpu(), cpu)
    error = (got.double() - expected).norm() / expected.norm()
    # bf16 is rounded twice: probabilities, and the result or its share beside a sink
    assert error < (1e-2 if dtype is torch.bfloat16 else 2e-5)


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
