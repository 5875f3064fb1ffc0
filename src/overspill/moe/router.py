"""The top-k router. No token is dropped.

Shapes: T tokens, D model, E experts, K top-k.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over ranks."""


class RouterOutput(NamedTuple):
    weights_TK: Tensor
    """Routing weights, float32."""
    expert_ids_TK: Tensor
    """Expert indices, int64, in descending order of probability."""
    balance_loss: Tensor
    """Scalar, float32; 1.0 for an even load."""


class Router(nn.Module):
    """Softmax over all experts, then top-k. Computed in float32 for any dtype of the model, because
    rounding would change the experts of a token."""

    def __init__(
        self,
        d_model: int,
        n_experts: int,
        top_k: int,
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.top_k = top_k
        # with one expert per token all weights would be 1, and the router would get no gradient
        self.normalize = normalize and top_k > 1
        self._total: Total | None = None
        self.weight = nn.Parameter(torch.empty(n_experts, d_model, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=0.02)

    def count_all_ranks(self, total: Total) -> None:
        """From now on the balance loss counts the assignments of all ranks."""
        self._total = total

    def forward(self, x_TD: Tensor, pieces: int = 1) -> RouterOutput:
        """Routes tokens that consist of `pieces` consecutive micro-batches."""
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = F.linear(x_TD.to(wide), self.weight.to(wide))
        probs_TE = logits_TE.softmax(-1)
        weights_TK, expert_ids_TK = probs_TE.topk(self.top_k, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        balance = balance_loss(probs_TE, expert_ids_TK, pieces, self._total)
        return RouterOutput(weights_TK, expert_ids_TK, balance)


def balance_loss(
    probs_TE: Tensor, expert_ids_TK: Tensor, pieces: int = 1, total: Total | None = None
) -> Tensor:
    """The Switch loss E * sum_e(share of assignments * mean probability), averaged over
    micro-batches, so that grouped micro-batches have the gradients of accumulated ones.

    It is linear in the probabilities. With the shares of all ranks, which `total` gives, the mean
    over ranks with equally many tokens is therefore the loss of one process with all tokens."""
    n_experts = probs_TE.shape[1]
    ids = expert_ids_TK.reshape(pieces, -1)
    counts = probs_TE.new_zeros(pieces, n_experts)
    # sums of 1.0 are exact in any order, so this scatter is deterministic
    counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=counts.dtype))
    if total is not None:
        counts = total(counts)
    share = counts / counts.sum(1, keepdim=True)
    mean_prob = probs_TE.view(pieces, -1, n_experts).mean(1)
    return n_experts * (share * mean_prob).sum(-1).mean()
