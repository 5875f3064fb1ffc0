"""The Mixture-of-Experts layer.

Shapes: B sequences of S tokens, T = B*S, D model, H hidden, E experts, K top-k.
"""

from typing import cast

import torch
from torch import Tensor, nn

from overspill.compute.activation import Activation
from overspill.compute.reference import moe_reference
from overspill.core.experts import ExpertId, ExpertShape
from overspill.moe.autograd import routed_experts
from overspill.moe.data_parallel import refuse_replicas
from overspill.moe.engine import Engine
from overspill.moe.init import expert_generator, init_expert_
from overspill.moe.placeholder import ExpertPlaceholder, OthersPlaceholder, stacked
from overspill.moe.router import Router
from overspill.moe.state_dict import show_experts, split_record


class MoE(nn.Module):
    """Router and experts. The experts are two stacked parameters until `give_away` moves them to an
    engine.

    An expert without tokens has a gradient of zeros, so that AdamW's decay is applied to it.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        n_experts: int,
        top_k: int,
        gated: bool,
        normalize: bool = True,
        layer: int = 0,
        n_layers: int = 1,
        seed: int = 0,
        meta_experts: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = ExpertShape(d_model, d_hidden, gated)
        self.layer = layer
        self.n_layers = n_layers
        self.seed = seed
        self.n_experts = n_experts
        self.engine: Engine | None = None
        self.router = Router(d_model, n_experts, top_k, normalize, device=device, dtype=dtype)
        where = "meta" if meta_experts else device
        self.w_in = nn.Parameter(
            torch.empty(n_experts, self.shape.in_rows, d_model, device=where, dtype=dtype)
        )
        self.w_out = nn.Parameter(
            torch.empty(n_experts, d_model, d_hidden, device=where, dtype=dtype)
        )
        if not self.w_in.is_meta:
            self.init_experts()

    @torch.no_grad()
    def init_experts(self) -> None:
        record = self.w_in.new_empty(self.shape.numel)
        w_in, w_out = split_record(record, self.shape)
        for index in range(self.n_experts):
            self.init_expert(index, record)
            self.w_in[index].copy_(w_in)
            self.w_out[index].copy_(w_out)

    def activation(self) -> Activation | None:
        """The usual one."""
        return None

    def expert_parameters(self) -> list[nn.Parameter]:
        return [self.w_in, self.w_out]

    def fill(self, index: int, record: Tensor, device: torch.device) -> None:
        """Writes the weights of one expert to its flat record. If the parameters are on the meta
        device, initial weights are drawn on `device`, which may be faster."""
        if not self.w_in.is_meta:
            w_in, w_out = split_record(record, self.shape)
            w_in.copy_(self.w_in[index].detach())
            w_out.copy_(self.w_out[index].detach())
            return
        scratch = torch.empty_like(record, device=device)
        self.init_expert(index, scratch)
        record.copy_(scratch)

    def init_expert(self, index: int, out_record: Tensor) -> None:
        """Fills the flat record of one expert with its initial weights."""
        generator = expert_generator(self.seed, ExpertId(self.layer, index), out_record.device)
        init_expert_(out_record, self.shape, self.n_layers, generator)

    @property
    def dtype(self) -> torch.dtype:
        return self.w_in.dtype if self.engine is None else self.engine.dtype

    @property
    def trained(self) -> bool:
        return self.w_in.requires_grad

    def give_away(self, engine: Engine, layer: int) -> None:
        """Replaces the parameters by a placeholder; the experts are in the engine now."""
        self.layer = layer
        self._replace(engine, ExpertPlaceholder(engine, layer))
        if engine.ranks is not None and engine.settings.shared_balance:
            self.router.count_all_ranks(engine.ranks.total_of_batch)

    def leave_to_others(self, engine: Engine) -> None:
        """Replaces the parameters by what stands for experts that other ranks have."""
        self._replace(engine, OthersPlaceholder(engine))

    def _replace(self, engine: Engine, placeholder: ExpertPlaceholder | OthersPlaceholder) -> None:
        trained = self.trained
        self.engine = engine
        del self.w_in, self.w_out
        self.experts = placeholder
        self.experts.requires_grad_(trained)
        show_experts(self, "experts", stacked(("w_in", "w_out")))
        refuse_replicas(self)

    def forward(self, x_BSD: Tensor, pieces: int = 1) -> tuple[Tensor, Tensor]:
        """Returns y and the balance loss."""
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        weights_TK, expert_ids_TK, balance = self.router(x_TD, pieces)
        if self.engine is None:
            y_TD = moe_reference(
                x_TD, expert_ids_TK, weights_TK, self.w_in, self.w_out, self.shape.gated
            )
        else:
            experts = cast(ExpertPlaceholder, self.experts)  # checked there
            y_TD = routed_experts(experts, x_TD, expert_ids_TK, weights_TK)
        return y_TD.view_as(x_BSD), balance
