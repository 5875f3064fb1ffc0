"""Output head and cross-entropy in one operation, in chunks of logits.

At 64 x 1024 tokens and a vocabulary of 32,000 the float32 logits alone would take 8 GiB. Here the
forward also computes the gradients, chunk by chunk; the backward only scales them. Shapes:
T tokens, D model, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

IGNORE = -100
_CHUNK_BYTES = 256 * 2**20


def fused_linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    chunk_bytes: int = _CHUNK_BYTES,
    pieces: int = 1,
) -> Tensor:
    """Return the mean cross-entropy of x @ weight^T over targets that are not -100, float32.

    The tokens consist of `pieces` consecutive micro-batches: the result is the mean of their means.
    A piece without any target counts as zero.
    """
    if not (torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad)):
        return _run(x_TD, weight_VD, targets_T, chunk_bytes, pieces, False, False)[0]
    loss: Tensor = _FusedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_TD, weight_VD, targets_T, chunk_bytes, pieces
    )
    return loss


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        chunk_bytes: int,
        pieces: int,
    ) -> Tensor:
        need_dx, need_dw = ctx.needs_input_grad[:2]
        loss, dx_TD, dw_VD = _run(x_TD, weight_VD, targets_T, chunk_bytes, pieces, need_dx, need_dw)
        ctx.save_for_backward(dx_TD, dw_VD)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx_TD, dw_VD = ctx.saved_tensors
        # not in place: with retain_graph this may run again
        return (
            None if dx_TD is None else _scaled(dx_TD, dloss),
            None if dw_VD is None else _scaled(dw_VD, dloss),
            None,
            None,
            None,
        )


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply in float32 and round once; torch would round a scalar factor to bf16 first."""
    return torch.mul(gradient, factor.view(1, 1), out=torch.empty_like(gradient))


@torch.no_grad()
def _run(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    chunk_bytes: int,
    pieces: int,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    scale_T = _row_scale(targets_T, pieces, wide)
    target_T1 = targets_T.clamp(min=0).unsqueeze(1)  # ignored targets have scale 0
    loss = x_TD.new_zeros((), dtype=wide)
    dx_TD = torch.empty_like(x_TD) if need_dx else None
    dw_wide = torch.zeros_like(weight_VD, dtype=wide) if need_dw else None
    rows = max(1, chunk_bytes // (weight_VD.shape[0] * wide.itemsize))
    for start in range(0, x_TD.shape[0], rows):
        chunk = slice(start, start + rows)
        x, target, scale = x_TD[chunk], target_T1[chunk], scale_T[chunk]
        logits = (x @ weight_VD.t()).to(wide)
        lse = logits.logsumexp(-1)
        loss += ((lse - logits.gather(1, target).squeeze(1)) * scale).sum()
        if not need_dx and not need_dw:
            continue
        # (softmax - one_hot) * scale, in the memory of the logits
        dlogits = logits.sub_(lse.unsqueeze(1)).exp_()
        dlogits.scatter_add_(1, target, dlogits.new_full(target.shape, -1.0))
        narrow = dlogits.mul_(scale.unsqueeze(1)).to(x.dtype)
        if dx_TD is not None:
            torch.mm(narrow, weight_VD, out=dx_TD[chunk])
        if dw_wide is not None:
            dw_wide += narrow.t() @ x
    dw_VD = None if dw_wide is None else dw_wide.to(weight_VD.dtype)
    return loss, dx_TD, dw_VD


def _row_scale(targets_T: Tensor, pieces: int, dtype: torch.dtype) -> Tensor:
    """Return the factor of each token's loss, without synchronizing with the device."""
    valid = (targets_T != IGNORE).view(pieces, -1)
    count = valid.sum(1, keepdim=True).clamp(min=1)
    return (valid.to(dtype) / (count * pieces)).view(-1)
