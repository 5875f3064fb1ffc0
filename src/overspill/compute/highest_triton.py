# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Chooses the token with the highest logit of each row, with noise or without, in two launches.

Shapes: N rows, V tokens, C pieces of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 4096
_SMALLEST = 1e-30


def highest(logits_NV: Tensor, temperatures_N: Tensor, noise_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The token with the highest logit / temperature - log(noise) of each row, the first of equal
    ones; and the same again, but -1 for a row with a logit that is NaN or whose highest is not
    finite. A row with temperature 0 has no noise."""
    n_rows, n_tokens = logits_NV.shape
    logits_NV = logits_NV.contiguous()
    n_pieces = triton.cdiv(n_tokens, _PIECE)
    device = logits_NV.device
    values_NC = torch.empty(n_rows, n_pieces, dtype=torch.float32, device=device)
    places_NC = torch.empty(n_rows, n_pieces, dtype=torch.int64, device=device)
    _highest_piece_kernel[(n_rows, n_pieces)](
        logits_NV, temperatures_N, noise_NV, values_NC, places_NC, n_tokens, _PIECE, _SMALLEST,
        num_warps=8,
    )  # fmt: skip
    tokens_2N = torch.empty(2, n_rows, dtype=torch.int64, device=device)
    _highest_row_kernel[(n_rows,)](
        values_NC, places_NC, tokens_2N, n_pieces, triton.next_power_of_2(n_pieces), num_warps=1
    )
    return tokens_2N[0], tokens_2N[1]


@triton.jit
def _highest_piece_kernel(
    logits, temperatures, noise, values, places, n_tokens, PIECE: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, PIECE)
    at = piece * PIECE + columns
    inside = at < n_tokens
    score = tl.load(logits + row * n_tokens + at, mask=inside, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        drawn = tl.load(noise + row * n_tokens + at, mask=inside, other=1.0)
        score = score / temperature - tl.log(tl.maximum(drawn, SMALLEST))
    is_nan = tl.max((score != score).to(tl.int32), 0)
    score = tl.where(score != score, float("-inf"), score)
    best = tl.max(score, 0)
    place = tl.min(tl.where(score == best, columns, PIECE), 0)
    to = row * tl.num_programs(1) + piece
    tl.store(values + to, tl.where(is_nan != 0, float("nan"), best))
    tl.store(places + to, (piece * PIECE + place).to(tl.int64))


@triton.jit
def _highest_row_kernel(values, places, tokens, n_pieces, PIECES: tl.constexpr):
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
    tl.store(tokens + tl.num_programs(0) + row, tl.where(good, token, -1))
