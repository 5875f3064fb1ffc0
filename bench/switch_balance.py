"""The load-balancing loss of the Switch Transformer paper, equations 4 to 6, for its pre-training.

That of transformers cannot be computed: its router returns no logits of all experts.
"""

from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENT = 0.01


class Balance:
    """Adds the loss of all routers to that of a model, by hooks. Padding is not counted."""

    def __init__(self, model: nn.Module) -> None:
        self.most_used = 0.0
        """The share of tokens that go to the most used expert of a layer, in the last step: the
        mean over layers."""
        self._logits: list[tuple[bool, Tensor]] = []
        model.register_forward_pre_hook(lambda *_: self._logits.clear())
        model.register_forward_hook(self._add, with_kwargs=True)
        for name, module in model.named_modules():
            if name.endswith("router.classifier"):
                module.register_forward_hook(self._collector("decoder." in name))

    def _collector(self, is_decoder: bool) -> Any:
        def collect(_module: nn.Module, _given: Any, logits: Tensor) -> None:
            self._logits.append((is_decoder, logits))

        return collect

    def _add(self, model: nn.Module, _given: Any, named: dict[str, Any], output: Any) -> Any:
        if not model.training:
            return output
        masks = {False: named["attention_mask"] != 0, True: named["labels"] >= 0}
        losses, most_used = [], []
        for is_decoder, logits in self._logits:
            logits_TE = logits.flatten(0, -2)[masks[is_decoder].flatten()].float()
            n_experts = logits_TE.shape[1]
            shares_E = torch.bincount(logits_TE.argmax(1), minlength=n_experts) / len(logits_TE)
            losses.append(n_experts * (shares_E * logits_TE.softmax(1).mean(0)).sum())
            most_used.append(shares_E.max())
        output.loss = output.loss + COEFFICIENT * torch.stack(losses).sum()
        self.most_used = torch.stack(most_used).mean().item()
        return output
