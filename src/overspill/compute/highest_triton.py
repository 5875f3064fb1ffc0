# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Chooses the token with the highest logit of each row, with noise or without, in two launches.

The noise is a function of the seed of a row, the number of the draw and the token (Philox): a step
that is one CUDA graph can draw, and other requests of the batch do not change the result.

Shapes: N rows, V tokens, C pieces of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 4096


def highest(
    logits_NV: Tensor,
    seeds_N: Tensor,
    numbers_N: Tensor,
    temperatures_N: Tensor,
    tokens_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the token with the highest logit / temperature - log(noise) of each row, the first of
    equal ones, which is drawn with the probability of a softmax. Return it a second time, with -1
    for a row with a logit that is NaN or whose highest is not finite. Temperatures are the bits of
    float32 in int64; a row with temperature 0 has no noise. The tokens are written to `tokens_N`,
    if it is given."""
    n_rows, n_tokens = logits_NV.shape
    logits_NV = logits_NV.contiguous()
    n_pieces = triton.cdiv(n_tokens, _PIECE)
    device = logits_NV.device
    values_NC = torch.empty(n_rows, n_pieces, dtype=torch.float32, device=device)
    places_NC = torch.empty(n_rows, n_pieces, dtype=torch.int64, device=device)
    _highest_piece_kernel[(n_rows, n_pieces)](
        logits_NV, seeds_N, numbers_N, temperatures_N, values_NC, places_NC, n_tokens, _PIECE,
        num_warps=8,
    )  # fmt: skip
    found_N = torch.empty(n_rows, dtype=torch.int64, device=device)
    if tokens_N is None:
        tokens_N = torch.empty_like(found_N)
    _highest_row_kernel[(n_rows,)](
        values_NC, places_NC, tokens_N, found_N, n_pieces, triton.next_power_of_2(n_pieces),
        num_warps=1,
    )  # fmt: skip
    return tokens_N, found_N


@triton.jit
def _exponential(seed, number, tokens):
    """Return noise of an exponential distribution, above 0 and finite."""
    zero = tokens * 0
    drawn, _, _, _ = tl.philox(seed, tokens, zero + number, zero, zero)
    uniform = (drawn.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    # -log(1 - u) is not exact if u is small, and small values matter most
    small = uniform * (1.0 + uniform * (0.5 + uniform * 0.3333333333))
    large = -tl.log(tl.maximum(1.0 - uniform, 5.9604645e-08))  # 2 ** -24: it may be 0
    return tl.where(uniform < 0.005, small, large)


@triton.jit
def _highest_piece_kernel(
    logits, seeds, numbers, temperatures, values, places, n_tokens, PIECE: tl.constexpr
):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, PIECE)
    at = piece * PIECE + columns
    inside = at < n_tokens
    score = tl.load(logits + row * n_tokens + at, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row).to(tl.int32).to(tl.float32, bitcast=True)
    if temperature > 0.0:
        number = tl.load(numbers + row).to(tl.int32)
        noise = _exponential(tl.load(seeds + row), number, at)
        score = score / temperature - tl.log(noise)
    is_nan = tl.max((score != score).to(tl.int32), 0)
    score = tl.where(score != score, float("-inf"), score)
    best = tl.max(score, 0)
    place = tl.min(tl.where(score == best, columns, PIECE), 0)
    to = row * tl.num_programs(1) + piece
    tl.store(values + to, tl.where(is_nan != 0, float("nan"), best))
    tl.store(places + to, (piece * PIECE + place).to(tl.int64))


@triton.jit
def _highest_row_kernel(values, places, tokens, found, n_pieces, PIECES: tl.constexpr):
    row = tl.program_id(0)
    pieces = tl.arange(0, PIECES)
    value = tl.load(values + row * n_pieces + pieces, mask=pieces < n_pieces, other=float("-inf"))
    is_nan = tl.max((value != value).to(tl.int32), 0)
    value = tl.where(value != value, float("-inf"), value)
    best = tl.max(value, 0)
    piece = tl.min(tl.where(value == best, pieces, PIECES), 0)
    token = tl.load(places + row * n_pieces + tl.minimum(piece, n_pieces - 1))
    good = (is_nan == 0) & (best > float("-inf")) & (best < float("inf"))
    tl.store(tokens + row, token)
    tl.store(found + row, tl.where(good, token, -1))
