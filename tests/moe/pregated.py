"""The oracle of pre-gates: a GPT-MoE in plain PyTorch, token by token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.models.gpt import GPTMoE
from overspill.moe.layer import MoE


def naive_loss(model: GPTMoE, tokens: Tensor, level: int) -> Tensor:
    """The loss of `model`, a plain GPT-MoE, with its gates as pre-gates of that level."""
    config, layers = model.config, model.moe_layers()
    x_BSD = model.embedding(tokens[:, :-1])
    cos, sin = model.rope(x_BSD.shape[1])
    probs: dict[int, Tensor] = {}
    balances: list[Tensor] = []
    for block in model.blocks:
        x_BSD = x_BSD + block.attention(block.attention_norm(x_BSD), cos, sin)
        normed = block.feed_norm(x_BSD)
        if block.moe is None:
            x_BSD = x_BSD + block.dense(normed)
            continue
        number = len(balances)
        x_TD = normed.flatten(0, 1)
        own = [number] if number < level else []
        for target in (*own, number + level):
            if target < len(layers):
                probs[target] = F.linear(x_TD, layers[target].router.weight).softmax(-1)
        weights_TK, ids_TK = probs[number].topk(config.top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        rows = [
            sum(w * _expert(block.moe, e, x) for w, e in zip(ws, es.tolist(), strict=True))
            for x, ws, es in zip(x_TD, weights_TK, ids_TK, strict=True)
        ]
        x_BSD = x_BSD + torch.stack(rows).view_as(x_BSD)
        share = F.one_hot(ids_TK, config.n_experts).float().mean((0, 1))
        balances.append(config.n_experts * (share * probs[number].mean(0)).sum())
    logits = F.linear(model.norm(x_BSD), model.embedding.weight)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return loss + config.balance_coef * torch.stack(balances).sum()


def _expert(moe: MoE, index: int, x_D: Tensor) -> Tensor:
    gate, up = (moe.w_in[index] @ x_D).chunk(2)
    return moe.w_out[index] @ (F.silu(gate) * up)
