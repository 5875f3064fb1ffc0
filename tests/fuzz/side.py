"""What both sides of a comparison do in the same way: plain PyTorch code on a model."""

import abc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from tests.fuzz.program import Case, Op

VOCAB = 24
# With a large eps an update depends on its gradient smoothly: rounding has no large effect, also
# where a gradient changes its sign.
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 3e-2}

Values = dict[str, Tensor]
"""What can be observed, by name."""


def new_model(case: Case) -> Any:
    """A model with large weights, so that all gradients are far from zero."""
    dtype = getattr(torch, case.dtype)
    model = _mixtral(case, dtype) if case.model == "mixtral" else _gpt(case, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(10)
    return model


def _gpt(case: Case, dtype: torch.dtype) -> GPTMoE:
    config = GPTConfig(
        vocab=VOCAB,
        n_layers=case.n_layers,
        d_model=16,
        d_hidden=16,
        n_heads=2,
        n_experts=case.n_experts,
        top_k=case.top_k,
        gated=case.gated,
        max_seq=8,
    )
    return GPTMoE(config, checkpoint=case.checkpoint, seed=1, dtype=dtype)


def _mixtral(case: Case, dtype: torch.dtype) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=case.n_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=case.n_experts,
        num_experts_per_tok=case.top_k,
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return MixtralForCausalLM(config).to(dtype).train()


def tokens_of(batch: int, device: torch.device) -> Tensor:
    """1 or 2 sequences of 3 to 7 tokens."""
    random = torch.Generator().manual_seed(batch)
    shape = (1 + batch % 2, 3 + (batch * 2) % 5)
    return torch.randint(VOCAB, shape, generator=random).to(device)


class Side(abc.ABC):
    """A model, its optimizer and the losses whose graphs are alive."""

    def __init__(self, case: Case, model: Any, device: torch.device) -> None:
        self.case = case
        self.model = model
        self.device = device
        self.graphs: dict[int, Tensor] = {}

    # -- passes -----------------------------------------------------------------------------

    def loss(self, batch: int) -> Tensor:
        tokens = tokens_of(batch, self.device)
        if self.case.model == "mixtral":
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
            return loss
        loss = self.model(tokens[:, :-1], tokens[:, 1:]).loss
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        output = self.model(tokens)
        found: Tensor = output.logits
        return found

    def forward(self, op: Op) -> Values:
        self.graphs.pop(op.graph, None)
        loss = self.loss(op.batch)
        self.graphs[op.graph] = loss
        return {"loss": loss.detach()}

    def backward(self, op: Op) -> Values:
        # taken out: after an error the graph cannot be used again
        loss = self.graphs.pop(op.graph)
        scaled = loss * float("nan") if op.name == "poison" else loss
        inputs = self._inputs() if op.name == "inputs" else None
        with self.accumulate() if op.name == "accumulate" else nullcontext():
            scaled.backward(retain_graph=op.name == "retain", inputs=inputs)
        if op.name == "retain":
            self.graphs[op.graph] = loss
        return {} if op.name == "poison" else self.gradients()

    def grad(self, op: Op) -> Values:
        grads = torch.autograd.grad(
            self.graphs[op.graph], self._inputs(), retain_graph=True, allow_unused=True
        )
        return {f"grad {n}": grad for n, grad in enumerate(grads) if grad is not None}

    def _inputs(self) -> list[nn.Parameter]:
        return [p for p in self.dense().values() if p.requires_grad][:2]

    def drop(self, op: Op) -> Values:
        self.graphs.pop(op.graph, None)
        return {}

    def evaluate(self, op: Op) -> Values:
        self.model.eval()
        try:
            with torch.no_grad():
                return {"loss": self.loss(op.batch)}
        finally:
            self.model.train()

    # -- parameters -------------------------------------------------------------------------

    def dense(self) -> dict[str, nn.Parameter]:
        """All parameters but the experts, by name."""
        experts = {id(p) for layer in range(self.case.n_layers) for p in self.experts(layer)}
        return {name: p for name, p in self.model.named_parameters() if id(p) not in experts}

    def gradients(self) -> Values:
        return {
            f"gradient of {name}": p.grad.detach().clone()
            for name, p in self.dense().items()
            if p.grad is not None
        }

    @abc.abstractmethod
    def experts(self, layer: int) -> list[nn.Parameter]:
        """The parameters that are a layer's experts, or stand for them."""

    def freeze(self, op: Op) -> Values:
        for parameter in self.experts(op.layer):
            parameter.requires_grad_(op.name == "unfreeze")
        return {}

    def freeze_dense(self, op: Op) -> Values:
        """Freezes a dense parameter, or trains it again."""
        parameter = list(self.dense().values())[op.batch % 3]
        parameter.requires_grad_(not parameter.requires_grad)
        return {}

    def set_lr(self, op: Op) -> Values:
        for group in self.optimizer.param_groups:
            group["lr"] = ADAM["lr"] / (1 + op.batch)
        return {}

    # -- the optimizer ----------------------------------------------------------------------

    optimizer: torch.optim.Optimizer

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    @abc.abstractmethod
    def step(self, op: Op) -> Values:
        """A step and zero_grad(); the norm, with clipping."""

    def zero_grad(self, op: Op) -> Values:
        if op.name == "model_zero_grad":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad()
        return {}

    @abc.abstractmethod
    def state(self) -> Values:
        """All weights (of bf16 the fp32 masters), moments and step counts, by the plain names."""
