"""The Mixture-of-Experts layer.

Shapes: B sequences of S tokens, T = B*S, D model, H hidden, E experts, K top-k.
"""

import torch
from torch import Tensor

from overspill.compute.reference import moe_reference
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertShape
from overspill.moe.autograd import routed_experts
from overspill.moe.engine import Engine
from overspill.moe.placeholder import OthersPlaceholder
from overspill.moe.router import Router
from overspill.moe.stacked_experts import StackedExperts


class MoE(StackedExperts):
    """Router and experts of a model whose layers and blocks are known.

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
        shape = ExpertShape(d_model, d_hidden, gated)
        super().__init__(shape, ExpertMap.whole(n_experts), None, seed, layer, n_layers)
        self.router = Router(d_model, n_experts, top_k, normalize, device=device, dtype=dtype)
        self._add_experts("meta" if meta_experts else device, dtype)
        if not self.w_in.is_meta:
            self.init_experts()

    def give_away(self, engine: Engine, layer: int) -> None:
        self.layer = layer
        super().give_away(engine, layer)
        if engine.ranks is not None and engine.settings.shared_balance:
            self.router.count_all_ranks(engine.ranks.total_of_batch)

    def leave_to_others(self, engine: Engine) -> None:
        """Replace the parameters by a placeholder of experts that other ranks have."""
        self._replace(engine, OthersPlaceholder(engine))

    def forward(self, x_BSD: Tensor, pieces: int = 1) -> tuple[Tensor, Tensor]:
        """Return y and the balance loss."""
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        weights_TK, expert_ids_TK, balance = self.router(x_TD, pieces)
        if self.engine is None:
            y_TD = moe_reference(
                x_TD, expert_ids_TK, weights_TK, self.w_in, self.w_out, self.shape.gated
            )
        else:
            y_TD = routed_experts(self.experts, x_TD, expert_ids_TK, weights_TK)
        return y_TD.view_as(x_BSD), balance
