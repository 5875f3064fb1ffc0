"""The oracle: plain PyTorch with torch.optim.AdamW and clip_grad_norm_."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from overspill.moe.router import Router, RouterOutput, balance_loss
from tests.fuzz.program import Case, Op
from tests.fuzz.side import ADAM, Side, Values, tokens_of

Choices = list[deque[Tensor]]
"""The experts that the subject's routers chose, for each layer one entry per forward."""


class Difference(AssertionError):
    """The subject and the oracle do not agree."""


class Oracle(Side):
    """bf16 parameters have fp32 masters, which the optimizer updates.

    Rounding may change the experts of a token whose probabilities are nearly equal. So the oracle
    follows the subject's routers, where their choice is one of the best.
    """

    def __init__(self, case: Case, model: Any, device: torch.device, choices: Choices) -> None:
        super().__init__(case, model.to(device), device)
        self._slack = 1e-4 if case.dtype == "float32" else 0.1
        if case.model == "gpt":
            model.checkpoint = False
        for layer, router in enumerate(routers(model)):
            router.forward = _Follow(router, choices[layer], self._slack)
        self.named = dict(model.named_parameters())
        self.masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.named.items():
            wide = case.dtype == "float32"
            self.masters[name] = parameter if wide else nn.Parameter(parameter.detach().float())
        self.new_optimizer()

    def experts(self, layer: int) -> list[nn.Parameter]:
        if self.case.model == "gpt":
            found: list[nn.Parameter] = self.model.moe_layers()[layer].expert_parameters()
            return found
        return list(self.model.model.layers[layer].mlp.experts.parameters())

    # -- passes -----------------------------------------------------------------------------

    def infer(self, op: Op) -> Values:
        with torch.no_grad():
            return {"logits": self.logits(tokens_of(op.batch, self.device))}

    def check_generated(self, tokens: Tensor, first: int) -> None:
        """Each token from position `first` on is among the likeliest after those before it."""
        for end in range(first, tokens.shape[1]):
            with torch.no_grad():
                logits = self.logits(tokens[:, :end])[:, -1].float()
            chosen = logits.gather(1, tokens[:, end : end + 1])
            gap = float((logits.max(-1, keepdim=True).values - chosen).max())
            if gap > self._slack * max(1.0, float(logits.abs().max())):
                raise Difference(f"a generated token is {gap:.2g} below the likeliest")

    # -- the optimizer ----------------------------------------------------------------------

    @torch.no_grad()
    def new_optimizer(self) -> None:
        """Masters belong to the optimizer: a new one starts from the rounded weights."""
        for name, master in self.masters.items():
            if master is not self.named[name]:
                master.copy_(self.named[name])
        self.optimizer = torch.optim.AdamW(list(self.masters.values()), **ADAM)

    def zero_grad(self, op: Op | None = None) -> Values:
        self.model.zero_grad()
        self.optimizer.zero_grad()
        return {}

    def step(self, op: Op) -> Values:
        observed: Values = {}
        for name, parameter in self.named.items():
            if parameter.grad is not None and self.masters[name] is not parameter:
                self.masters[name].grad = parameter.grad.float()
        if self.case.clip is not None:
            masters = list(self.masters.values())
            observed["norm"] = torch.nn.utils.clip_grad_norm_(masters, self.case.clip)
        self.optimizer.step()
        self._round([name for name, master in self.masters.items() if master.grad is not None])
        self.zero_grad()
        return observed

    @torch.no_grad()
    def _round(self, names: Iterable[str]) -> None:
        for name in names:
            if self.masters[name] is not self.named[name]:
                self.named[name].copy_(self.masters[name])

    def set_gradients(self, gradients: Values) -> None:
        """Takes over the dense gradients of a backward that was refused on its way."""
        for name, parameter in self.dense().items():
            grad = gradients.get(f"gradient of {name}")
            parameter.grad = None if grad is None else grad.clone()

    # -- states -----------------------------------------------------------------------------

    def state(self) -> Values:
        values: Values = {"lr": torch.tensor(self.optimizer.param_groups[0]["lr"])}
        for name, master in self.masters.items():
            values[f"weight {name}"] = master.detach().cpu().clone()
            for key, value in self.optimizer.state.get(master, {}).items():
                values[f"{key} {name}"] = value.detach().cpu().clone()
        return values

    @torch.no_grad()
    def adopt(self, values: Values, with_lr: bool = True) -> None:
        """Continues from this state, so that rounding differences do not add up."""
        for name, master in self.masters.items():
            master.copy_(values[f"weight {name}"])
            self.optimizer.state.pop(master, None)
            if f"exp_avg {name}" in values:
                moments = {
                    key: values[f"{key} {name}"].clone().to(master.device)
                    for key in ("exp_avg", "exp_avg_sq")
                }
                step = values[f"step {name}"].float()
                self.optimizer.state[master] = {"step": step, **moments}
        if with_lr:
            self.optimizer.param_groups[0]["lr"] = values["lr"].item()
        self._round(self.masters)


def routers(model: Any) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, Router) or "TopKRouter" in str(type(m))]


class _Follow:
    """The forward of a router, with the experts that the subject's router chose."""

    def __init__(self, router: Any, choices: deque[Tensor], slack: float) -> None:
        self._router = router
        self._choices = choices
        self._slack = slack

    def __call__(self, x_TD: Tensor, pieces: int = 1) -> Any:
        router, ids = self._router, self._choices.popleft()
        x_TD = x_TD.reshape(-1, x_TD.shape[-1])
        if isinstance(router, Router):
            logits = torch.nn.functional.linear(x_TD.float(), router.weight.float())
        else:
            logits = torch.nn.functional.linear(x_TD, router.weight)
        probs = logits.float().softmax(-1)
        weights = probs.gather(1, ids)
        worst = self._worst(probs.detach(), weights.detach())
        if worst > self._slack:
            raise Difference(f"a router chose an expert {worst:.2g} less probable than another")
        if not isinstance(router, Router):
            return logits, weights / weights.sum(-1, keepdim=True), ids
        if router.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return RouterOutput(weights, ids, balance_loss(probs, ids, pieces))

    def _worst(self, probs: Tensor, weights: Tensor) -> float:
        """How much less probable a chosen expert is than one that could have been chosen."""
        least = probs.topk(self._router.top_k, dim=-1).values[:, -1]
        return float((least - weights.min(-1).values).max())
