"""Cross-entropy of the models of transformers, a few rows of logits at a time.

Their own `ForCausalLMLoss` turns all logits into float32 and keeps that many log-probabilities: at
64 x 1024 tokens and a vocabulary of 32,000 that is 25 GB. Here the forward keeps nothing but the
logits that the model returns anyway, and the backward computes their gradient, scaled and rounded
once, in their own dtype. Shapes: T tokens, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_BYTES = 256 * 2**20


def install(model: torch.nn.Module) -> None:
    """Let every part of `model` that would use `ForCausalLMLoss` use this loss instead."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    for module in model.modules():
        # Asked of a part that has no loss, loss_function would warn that it takes the default.
        has_loss = getattr(module, "loss_type", None) in LOSS_MAPPING
        if has_loss and module.loss_function is ForCausalLMLoss:
            module.loss_function = causal_lm_loss  # type: ignore[assignment]


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """What transformers' `ForCausalLMLoss` gives, float32: the mean over the tokens that are not
    ignored, or their sum divided by `num_items_in_batch`."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets_T = shift_labels.reshape(-1).to(logits.device)
    logits_TV = logits.reshape(-1, vocab_size)
    total: Tensor = _SummedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T, ignore_index
    )
    if num_items_in_batch is None:
        return total / (targets_T != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, ignore_index: int) -> Tensor:
        ctx.save_for_backward(logits_TV, targets_T)
        ctx.ignore_index = ignore_index
        # Summed at the end, all at once: float32 would lose digits in a long running sum.
        losses_T = logits_TV.new_empty(targets_T.shape, dtype=torch.float32)
        for rows in _chunks(logits_TV):
            losses_T[rows] = F.cross_entropy(
                logits_TV[rows].float(),
                targets_T[rows],
                ignore_index=ignore_index,
                reduction="none",
            )
        return losses_T.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, targets_T = ctx.saved_tensors
        valid_T1 = (targets_T != ctx.ignore_index).unsqueeze(1)
        # An ignored row has scale 0, so any target will do. Not valid * dtotal: with no valid row
        # at all dtotal is infinite.
        scale_T1 = torch.where(valid_T1, dtotal, 0.0)
        target_T1 = torch.where(valid_T1, targets_T.unsqueeze(1), 0)
        dlogits_TV = torch.empty_like(logits_TV)
        for rows in _chunks(logits_TV):
            probs = logits_TV[rows].softmax(-1, dtype=torch.float32)
            probs.scatter_add_(1, target_T1[rows], probs.new_full((len(probs), 1), -1.0))
            torch.mul(probs, scale_T1[rows], out=dlogits_TV[rows])
        return dlogits_TV, None, None


def _chunks(logits_TV: Tensor) -> Iterator[slice]:
    """Rows whose float32 logits and probabilities fit together in _CHUNK_BYTES."""
    n_rows, vocab = logits_TV.shape
    step = max(1, _CHUNK_BYTES // (2 * 4 * vocab))
    for start in range(0, n_rows, step):
        yield slice(start, start + step)
