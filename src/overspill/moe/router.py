"""The top-k router. No token is dropped.

Shapes: T tokens, D model, E experts, K top-k.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over ranks."""
_WIDE_AT_ONCE = 1 << 24
"""Elements of the input that are float32 at a time in backward (64 MiB)."""


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
        """Let the balance loss count the assignments of all ranks from now on."""
        self._total = total

    def forward(self, x_TD: Tensor, pieces: int = 1) -> RouterOutput:
        """Route tokens that consist of `pieces` consecutive micro-batches."""
        probs_TE = wide_linear(x_TD, self.weight).softmax(-1)
        weights_TK, expert_ids_TK = probs_TE.topk(self.top_k, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        balance = balance_loss(probs_TE, expert_ids_TK, pieces, self._total)
        return RouterOutput(weights_TK, expert_ids_TK, balance)


def wide_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """The product in float32 (or wider), [T, E]."""
    if x_TD.dtype.itemsize >= 4:
        return F.linear(x_TD, weight_ED.to(x_TD.dtype))
    logits_TE: Tensor = _WideLinear.apply(x_TD, weight_ED)  # type: ignore[no-untyped-call]
    return logits_TE


class _WideLinear(torch.autograd.Function):
    """Keeps the 16-bit input for backward. Autograd would keep a float32 copy of it, which takes
    twice the memory of the tokens in each layer."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return F.linear(x_TD.float(), weight_ED.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        need_dx, need_dw = ctx.needs_input_grad
        step = max(1, _WIDE_AT_ONCE // max(1, x_TD.shape[1]))
        dx_TD = torch.empty_like(x_TD) if need_dx else None
        dw_ED = torch.zeros_like(weight_ED, dtype=torch.float32) if need_dw else None
        wide_ED = weight_ED.float()
        for start in range(0, len(x_TD), step):
            chunk = slice(start, start + step)
            if dx_TD is not None:
                dx_TD[chunk] = dlogits_TE[chunk] @ wide_ED
            if dw_ED is not None:
                dw_ED.addmm_(dlogits_TE[chunk].t(), x_TD[chunk].float())
        return dx_TD, None if dw_ED is None else dw_ED.to(weight_ED.dtype)


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
    if total is None:
        share = counts / ids.shape[1]
    else:
        counts = total(counts)
        share = counts / counts.sum(1, keepdim=True)
    mean_prob = probs_TE.view(pieces, -1, n_experts).mean(1)
    return (share * mean_prob).sum() * (n_experts / pieces)
