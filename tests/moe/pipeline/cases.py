"""A pipelined layer and the same in plain autograd: a loop over experts of one process with the
tokens of all ranks, whose loss is the mean of the ranks' losses."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import overspill
from bench.loopback import LoopbackExchange
from overspill.parallel.exchange.collective import CollectiveExchange
from overspill.parallel.exchange.interface import Exchange, LocalExchange
from overspill.parallel.exchange.staged import StagedExchange
from overspill.parallel.ranks import Ranks
from overspill.transfer.streams import Inject

D_MODEL, D_HIDDEN, N_EXPERTS = 8, 16, 5
STRATEGIES = ("none", "S1", "S2", "S3", "S4")
KINDS = (("gelu", False), ("silu", True), ("relu", True))
LOADS = ("even", "two experts", "few tokens", "empty rank")


@dataclass(frozen=True)
class Case:
    partitions: int
    strategy: str
    kind: tuple[str, bool]
    top_k: int
    load: str
    backend: str
    late: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    d_model: int = D_MODEL
    d_hidden: int = D_HIDDEN
    tokens: int = 21

    def layer(self, **options: Any) -> "overspill.MoELayer":
        activation, gated = self.kind
        layer = overspill.MoELayer(
            self.d_model,
            self.d_hidden,
            N_EXPERTS,
            self.top_k,
            activation=activation,
            gated=gated,
            partitions=self.partitions,
            strategy=self.strategy,
            seed=3,
            dtype=self.dtype,
            device=self.device,
            **options,
        )
        with torch.no_grad():  # initial weights would give gradients near the tolerance
            for weight, factor in ((layer.w_in, 10), (layer.w_out, 10), (layer.router.weight, 20)):
                weight.mul_(factor * (D_MODEL / self.d_model) ** 0.5)
            if self.load == "two experts":  # with a constant in each token: others are not chosen
                layer.router.weight[2:, 0] = -100
        return layer

    def x(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        tokens = {"few tokens": 3, "empty rank": self.tokens * (rank % 2 == 0)}
        n_tokens = tokens.get(self.load, self.tokens + rank)
        x = torch.randn(n_tokens, self.d_model, generator=generator)
        if self.load == "two experts":
            x[:, 0] = 1
        return x.to(self.device, self.dtype).requires_grad_()

    def dy(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + rank)
        n_tokens = len(self.x(rank))
        dy = torch.randn(n_tokens, self.d_model, generator=generator)
        return dy.to(self.device, self.dtype)


class Result(NamedTuple):
    """Of one rank; gradients of experts are those of its experts."""

    y: Tensor
    balance: Tensor
    dx: Tensor
    drouter: Tensor
    dw_in: Tensor
    dw_out: Tensor


def loss_of(case: Case, y: Tensor, balance: Tensor, rank: int) -> Tensor:
    return (y * case.dy(rank)).sum().float() + balance


def run(case: Case, layer: "overspill.MoELayer", rank: int) -> Result:
    x = case.x(rank)
    y, balance = layer(x)
    loss_of(case, y, balance, rank).backward()
    grads = x.grad, layer.router.weight.grad, layer.w_in.grad, layer.w_out.grad
    assert all(grad is not None for grad in grads)
    result = Result(y.detach(), balance.detach(), *(g.clone() for g in grads if g is not None))
    layer.zero_grad()
    return Result(*(tensor.cpu() for tensor in result))


def naive(case: Case, n_ranks: int) -> list[Result]:
    """In float32, each rank with all experts; their gradients are the mean over ranks."""
    # partitions and so on do not matter here
    plain = replace(case, partitions=1, strategy="none", backend="local", late=False)
    found = [_naive_rank(plain, rank) for rank in range(n_ranks)]
    dw_in, dw_out = (sum(grads) / n_ranks for grads in zip(*(r[4:] for r in found), strict=True))
    return [result._replace(dw_in=dw_in, dw_out=dw_out) for result in found]


@functools.cache
def _naive_rank(case: Case, rank: int) -> Result:
    layer = replace(case, device="cpu", dtype=torch.float32).layer()
    with torch.no_grad():
        for parameter, rounded in zip(layer.parameters(), case.layer().parameters(), strict=True):
            parameter.copy_(rounded)
    x = case.x(rank).detach().cpu().float().requires_grad_()
    y, balance = naive_layer(layer, x)
    ((y * case.dy(rank).cpu().float()).sum() + balance).backward()
    grads = x.grad, layer.router.weight.grad, layer.w_in.grad, layer.w_out.grad
    return Result(y.detach(), balance.detach(), *(grad for grad in grads if grad is not None))


def naive_layer(layer: "overspill.MoELayer", x: Tensor) -> tuple[Tensor, Tensor]:
    if not len(x):
        zero = sum((p * 0).sum() for p in layer.parameters())
        assert isinstance(zero, Tensor)
        return x * 0, zero
    weights, ids, balance = layer.router(x)
    function = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}[_name(layer)]
    y = torch.zeros_like(x)
    for expert in range(layer.n_experts):
        token, k = (ids == expert).nonzero(as_tuple=True)
        h = x[token] @ layer.w_in[expert].T
        if layer.shape.gated:
            gate, up = h.chunk(2, dim=-1)
            h = function(gate) * up
        else:
            h = function(h)
        y = y.index_add(0, token, (h @ layer.w_out[expert].T) * weights[token, k, None])
    return y, balance


def _name(layer: "overspill.MoELayer") -> str:
    return layer.activation().form.function.name.lower()


def backend(name: str, mesh: DeviceMesh | None, device: str, inject: Inject | None) -> Exchange:
    where = torch.device(device)
    if name in ("local", "loopback"):
        made: dict[str, Callable[[], Exchange]] = {
            "local": partial(LocalExchange, where, inject=inject),
            "loopback": partial(LoopbackExchange, where, inject=inject),
        }
        return made[name]()
    assert mesh is not None
    kind = {"collective": CollectiveExchange, "staged": StagedExchange}[name]
    return kind(Ranks(mesh, where), where, inject=inject)
