"""The schedules of other systems, for comparison, over the same exchange: with one expert on each
rank, as in the paper's layers, and with PyTorch's operations.

`Synchronous` has the order of FastMoE: send all rows, compute, return them. `PeerPieces` has that
of FasterMoE: rows are divided by the ranks they go to, not along the batch, into a fixed number of
pieces, and all pieces are sent before the first result returns. Dynamic shadowing is not part of
it, and point-to-point messages cost no more here than a collective.
"""

import abc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overspill
from overspill.parallel.exchange.interface import Exchange
from overspill.transfer.work_stream import Arrival

PEER_PIECES = 16
"""64 ranks in groups of 4, FasterMoE's default."""


def expert(x_ND: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x_ND, w_in[0])), w_out[0])


def _sent(exchange: Exchange, rows: Tensor) -> Arrival:
    return exchange.send(rows, [len(rows)], [len(rows)])


class _Sent(torch.autograd.Function):
    """Rows go to the ranks that compute them, or back; compute waits for them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return _sent(exchange, rows).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _sent(ctx.exchange, grad).wait(), None


class _Pieces(torch.autograd.Function):
    """S, C and R of all pieces. Each is computed and differentiated by autograd on its own."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, w_in: Tensor, w_out: Tensor, exchange: Exchange, n: int
    ) -> Tensor:
        weights = [weight.detach().requires_grad_() for weight in (w_in, w_out)]
        ctx.exchange, ctx.weights, ctx.computed = exchange, weights, []
        arriving = [_sent(exchange, piece) for piece in rows.tensor_split(n)]
        returning = []
        for arrival in arriving:
            x = arrival.wait().detach().requires_grad_()
            with torch.enable_grad():
                y = expert(x, *weights)
            ctx.computed.append((x, y))
            returning.append(_sent(exchange, y.detach()))
        return torch.cat([arrival.wait() for arrival in returning])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        arriving = [_sent(ctx.exchange, piece) for piece in grad.tensor_split(len(ctx.computed))]
        returning = []
        for arrival, (x, y) in zip(arriving, ctx.computed, strict=True):
            inputs = (x, *ctx.weights)
            dx, *dw = torch.autograd.grad(y, inputs, arrival.wait())
            for weight, part in zip(ctx.weights, dw, strict=True):
                weight.grad = part if weight.grad is None else weight.grad.add_(part)
            returning.append(_sent(ctx.exchange, dx))
        sums = [weight.grad for weight in ctx.weights]
        return torch.cat([arrival.wait() for arrival in returning]), *sums, None, None


class _Baseline(nn.Module, abc.ABC):
    """The router and the expert of a layer, with another schedule."""

    def __init__(self, layer: overspill.MoELayer, exchange: Exchange) -> None:
        super().__init__()
        if layer.n_experts != 1:
            raise ValueError(f"the layer has {layer.n_experts} experts; baselines compute one")
        self.router, self.w_in, self.w_out = layer.router, layer.w_in, layer.w_out
        self._exchange = exchange

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        weights_TK, ids_TK, balance = self.router(x_TD)
        order_R = ids_TK.view(-1).argsort(stable=True)
        torch.bincount(ids_TK.view(-1)).tolist()  # the host needs the rows of each rank
        y_RD = self._experts(x_TD.index_select(0, order_R // ids_TK.shape[1]))
        y_TKD = y_RD.index_select(0, order_R.argsort()).view(*ids_TK.shape, -1)
        return (y_TKD * weights_TK.unsqueeze(-1)).sum(1).to(x_TD.dtype), balance

    @abc.abstractmethod
    def _experts(self, rows: Tensor) -> Tensor:
        """The results of rows sorted by expert, exchanged and computed."""


class Synchronous(_Baseline):
    def _experts(self, rows: Tensor) -> Tensor:
        rows = _Sent.apply(rows, self._exchange)
        return _Sent.apply(expert(rows, self.w_in, self.w_out), self._exchange)


class PeerPieces(_Baseline):
    def _experts(self, rows: Tensor) -> Tensor:
        return _Pieces.apply(rows, self.w_in, self.w_out, self._exchange, PEER_PIECES)
