"""Cross-entropy of transformers' models in chunks of logits.

transformers' `ForCausalLMLoss` converts all logits to float32 and keeps as many log-probabilities,
25 GB at 64 x 1024 tokens and a vocabulary of 32,000. Here the forward keeps only the logits that
the model returns, and the backward computes their gradient in their dtype, rounded once. Shapes:
T tokens, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_BYTES = 256 * 2**20


def install(model: torch.nn.Module) -> None:
    """Replaces `ForCausalLMLoss` in all parts of `model`."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    for module in model.modules():
        # loss_function of a module without a loss would log a warning
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
    chunk_bytes: int = _CHUNK_BYTES,
    **kwargs: Any,
) -> Tensor:
    """Return the result of `ForCausalLMLoss`, float32: the mean over the tokens that are not
    ignored, or their sum divided by `num_items_in_batch`."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets_T = shift_labels.reshape(-1).to(logits.device)
    logits_TV = logits.reshape(-1, vocab_size)
    total: Tensor = _SummedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T, ignore_index, chunk_bytes
    )
    if num_items_in_batch is None:
        return total / (targets_T != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, ignore_index: int, chunk_bytes: int
    ) -> Tensor:
        ctx.save_for_backward(logits_TV, targets_T)
        ctx.ignore_index, ctx.chunk_bytes = ignore_index, chunk_bytes
        # summed at the end: a long running sum in float32 loses digits
        losses_T = logits_TV.new_empty(targets_T.shape, dtype=torch.float32)
        for rows in _chunks(logits_TV, chunk_bytes):
            losses_T[rows] = F.cross_entropy(
                logits_TV[rows].float(),
                targets_T[rows],
                ignore_index=ignore_index,
                reduction="none",
            )
        return losses_T.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None, None, None]:
        logits_TV, targets_T = ctx.saved_tensors
        valid_T1 = (targets_T != ctx.ignore_index).unsqueeze(1)
        # ignored rows get scale 0 and any target; not valid * dtotal, which is infinite without
        # any valid row
        scale_T1 = torch.where(valid_T1, dtotal, 0.0)
        target_T1 = torch.where(valid_T1, targets_T.unsqueeze(1), 0)
        dlogits_TV = torch.empty_like(logits_TV)
        for rows in _chunks(logits_TV, ctx.chunk_bytes):
            probs = logits_TV[rows].softmax(-1, dtype=torch.float32)
            probs.scatter_add_(1, target_T1[rows], probs.new_full((len(probs), 1), -1.0))
            torch.mul(probs, scale_T1[rows], out=dlogits_TV[rows])
        return dlogits_TV, None, None, None


def _chunks(logits_TV: Tensor, chunk_bytes: int) -> Iterator[slice]:
    """Yield slices of token rows whose float32 logits and probabilities fit into `chunk_bytes`."""
    n_rows, vocab = logits_TV.shape
    step = max(1, chunk_bytes // (2 * 4 * vocab))
    for start in range(0, n_rows, step):
        yield slice(start, start + step)
