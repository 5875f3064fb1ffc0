"""`overspill.MoELayer`: a Mixture-of-Experts layer for any model, with pipelined exchanges.

Shapes: T tokens, D model, E experts of all ranks, K top-k.
"""

import contextlib
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from overspill.compute.activation import activation_named
from overspill.compute.experts import StackedWeights
from overspill.core.errors import ConfigError, OrderError, OverspillError
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertShape
from overspill.moe.autograd import routed_experts
from overspill.moe.data_parallel import check_ignored
from overspill.moe.engine import Engine
from overspill.moe.init import STD
from overspill.moe.pipeline.arguments import Arguments, check_shape, check_type, device_type
from overspill.moe.pipeline.autograd import PassPlan, pipelined_experts
from overspill.moe.pipeline.experts import Experts
from overspill.moe.pipeline.link import RankLink
from overspill.moe.pipeline.speeds import measure_speeds
from overspill.moe.pipeline.tuner import Tuner
from overspill.moe.router import Router
from overspill.moe.stacked_experts import StackedExperts
from overspill.parallel.dense import average_gradients
from overspill.parallel.exchange.interface import Exchange
from overspill.plan.reuse import REUSING, STRATEGIES, Speeds, Strategy, cheapest, strategy_named

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class MoELayer(StackedExperts):
    """Router and experts; returns `(output, balance_loss)`.

    The parameters are those of this rank's experts, `w_in` [experts, H or 2H, D] and `w_out`
    [experts, D, H], and `router.weight`, which all ranks have.

    Args:
        d_model: the size of a token.
        d_hidden: the hidden size of an expert.
        num_experts: experts of the layer, on all ranks together.
        top_k: experts for each token.
        pipeline: divide the tokens into partitions, so that exchange and compute overlap. In
            one process nothing is exchanged: there is one partition unless `partitions` says
            otherwise.
        memory_reuse: let partitions share the memory of activations, which are restored in
            backward by the strategy that is fastest by measured speeds.
        mesh: ranks that divide the experts, of one dimension. Each rank passes its own tokens.
            Gradients of experts are those of the mean of the ranks' losses.
        activation: "gelu", "silu", "relu" or "relu2", the square of "relu".
        gated: multiply the activation of one half of the first matrix's rows by the other half.
        partitions: a fixed number of partitions; None: found by timing passes of the training.
        strategy: "none", "S1", "S2", "S3" or "S4"; None: chosen as `memory_reuse` says.
        exchange: how token rows travel; None: chosen for the mesh.
        dtype: data type of the parameters.
        device: their device.
        seed: of the initial weights, which are then the same for any number of ranks; None: a
            random one, the same on all ranks.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        top_k: int,
        pipeline: bool = True,
        memory_reuse: bool = True,
        mesh: "DeviceMesh | None" = None,
        activation: str = "gelu",
        gated: bool = False,
        *,
        partitions: int | None = None,
        strategy: str | None = None,
        exchange: Exchange | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> None:
        arguments = Arguments(
            d_model, d_hidden, num_experts, top_k, pipeline, memory_reuse, activation, gated,
            partitions, strategy, type(exchange).__name__, dtype, device_type(device), seed,
        )  # fmt: skip
        link = RankLink(mesh, exchange)
        seed = link.agree_on(arguments)
        if link.size > num_experts:
            raise ConfigError(
                f"{link.size} ranks cannot divide {num_experts} experts; give at most "
                f"{num_experts} ranks"
            )
        shape = ExpertShape(d_model, d_hidden, gated)
        own = ExpertMap.part(num_experts, link.rank, link.size)
        super().__init__(shape, own, activation_named(activation, gated), seed)
        self._link = link
        self._fixed = None if strategy is None else strategy_named(strategy)
        self._memory_reuse = memory_reuse
        self.speeds: Speeds | None = None
        """The measured speeds on which the choice of a strategy was based, if it was measured."""
        alone = not pipeline or not self._link.exchanges
        even = memory_reuse if self._fixed is None else self._fixed in REUSING
        self._tuner = Tuner(partitions or (1 if alone else None), even)
        self.router = Router(d_model, num_experts, top_k, device=device, dtype=dtype)
        self._add_experts(device, dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw initial weights, the same ones each time. No-op on the meta device."""
        if self.w_in.is_meta:
            return
        generator = torch.Generator(self.router.weight.device).manual_seed(self.seed)
        self.router.weight.normal_(0.0, STD, generator=generator)
        self.init_experts()

    # -- forward ------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output, with the shape of `x` [..., D], and the balance loss of this rank's tokens,
        a scalar. With a mesh it must be called on all ranks, also by those without tokens."""
        try:
            check_shape(x, self.shape.d_model)
        except ConfigError as error:
            self._refuse(error)
        x_TD = x.reshape(-1, self.shape.d_model)
        with torch.autocast(x.device.type, enabled=False):
            weights_TK, expert_ids_TK, balance = self._route(x_TD)
        if self.engine is not None:
            y_TD = routed_experts(self.experts, x_TD, expert_ids_TK, weights_TK)
        else:
            y_TD = self._pipelined(x_TD, expert_ids_TK, weights_TK)
        return y_TD.view_as(x), balance

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if len(x_TD):
            return tuple(self.router(x_TD))
        ids_TK = torch.empty(0, self.router.top_k, dtype=torch.int64, device=x_TD.device)
        # without tokens there is nothing to balance, but the router has a gradient, as elsewhere
        balance = (self.router.weight.float() * 0).sum()
        return ids_TK.to(torch.float32), ids_TK, balance

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pipelined(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        kind = x_TD.device.type
        w_in: Tensor = self.w_in
        w_out: Tensor = self.w_out
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x_TD, w_in, w_out = (tensor.to(dtype) for tensor in (x_TD, w_in, w_out))
        try:
            check_type(x_TD, w_in)
            if self._link.size > 1:
                check_ignored(self.expert_parameters())
            exchange = self._link.on(x_TD.device)
        except OverspillError as error:
            self._refuse(error)
        trained = any(t.requires_grad for t in (x_TD, weights_TK, w_in, w_out))
        training = torch.is_grad_enabled() and trained
        with torch.autocast(kind, enabled=False):
            rows, timer = self._tuner.route(
                expert_ids_TK, self.expert_map, exchange, training, x_TD.dtype
            )
            strategy = STRATEGIES["none"]
            if training:
                strategy = self._strategy(StackedWeights(w_in, w_out), exchange)
            copies = self._link.copies(exchange) if strategy.copies else None
            plan = PassPlan(rows, self.shape, self._activation, strategy, copies, timer)
            return pipelined_experts(x_TD, weights_TK, w_in, w_out, plan)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _refuse(self, error: OverspillError) -> NoReturn:
        """Raise in a forward, here and on the ranks that wait for this one."""
        if self.engine is None and self._link.size > 1:
            with contextlib.suppress(OverspillError):  # other ranks are gone, or nothing is sent
                self._tuner.tell_failure(self.n_experts, self._link.on(self.w_in.device))
        raise error

    def _strategy(self, weights: StackedWeights, exchange: Exchange) -> Strategy:
        """The fixed strategy, or the cheapest one by measured speeds. A CPU has no memory to save
        by copies: there nothing is measured."""
        if self._fixed is None:
            if not self._memory_reuse:
                self._fixed = STRATEGIES["none"]
            elif exchange.device.type == "cpu":
                self._fixed = STRATEGIES["S4"]
            else:
                experts = Experts(weights, self.shape, self._activation)
                self.speeds = measure_speeds(experts, exchange, self._link.copies(exchange))
                self._fixed = cheapest(self.shape, self.speeds, weights.w_in.itemsize)
        return self._fixed

    @property
    def partitions(self) -> int | None:
        """The fixed number of partitions; None while it is found by search."""
        return self._tuner.partitions

    def best_partitions(self, tokens: int) -> int | None:
        """The number of partitions for batches of so many tokens (of the rank that has most); None
        while it is not known."""
        return self.partitions or self._tuner.search.settled(tokens)

    @property
    def strategy(self) -> str | None:
        """The name of the memory reusing strategy; None before the first training pass."""
        return None if self._fixed is None else self._fixed.name

    def extra_repr(self) -> str:
        held = "" if self.expert_map.is_whole else f", {self.expert_map.n_local} of them here"
        return f"{self.shape}, {self.n_experts} experts{held}, top_k={self.router.top_k}"

    def average_gradients(self, model: nn.Module) -> None:
        """Replace the gradients of `model`, without those of experts, by their mean over the ranks
        of this layer, as DistributedDataParallel does. Must be called on all ranks, after backward.
        No-op without a mesh."""
        if self.engine is not None:
            raise OrderError("overspill.AdamW averages the gradients of an offloaded model itself")
        ranks = self._link.on(self.router.weight.device).ranks
        if ranks is None or ranks.size == 1:
            return
        layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        experts = {id(p) for layer in layers for p in layer.expert_parameters()}
        dense = [p for p in model.parameters() if id(p) not in experts and p.requires_grad]
        average_gradients(ranks, dense, len(dense))

    def give_away(self, engine: Engine, layer: int) -> None:
        super().give_away(engine, layer)
        if engine.ranks is not None and engine.settings.shared_balance:
            self.router.count_all_ranks(engine.ranks.total)
