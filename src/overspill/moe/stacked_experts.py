"""The experts of a layer as two stacked parameters, until an engine has them."""

from typing import cast

import torch
from torch import Tensor, nn

from overspill.compute.activation import Activation
from overspill.core.errors import ConfigError
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertId, ExpertShape
from overspill.moe.data_parallel import refuse_replicas
from overspill.moe.engine import Engine
from overspill.moe.init import expert_generator, init_expert_
from overspill.moe.placeholder import ExpertPlaceholder, OthersPlaceholder, stacked
from overspill.moe.router import Router
from overspill.moe.state_dict import show_experts, split_record


class StackedExperts(nn.Module):
    """Base of layers with a router and with experts in the parameters `w_in` [experts, H or 2H, D]
    and `w_out` [experts, D, H]. After `give_away` an engine has the experts, and `experts` is their
    placeholder."""

    router: Router
    experts: ExpertPlaceholder  # or an OthersPlaceholder, which `routed_experts` refuses

    def __init__(
        self,
        shape: ExpertShape,
        expert_map: ExpertMap,
        activation: Activation | None,
        seed: int,
        layer: int = 0,
        n_layers: int = 1,
    ) -> None:
        """`layer` and `n_layers`, those of the model, and the seed decide the initial weights."""
        super().__init__()
        self.shape = shape
        self.expert_map = expert_map
        self.n_experts = expert_map.n_global
        self.seed = seed
        self.layer, self.n_layers = layer, n_layers
        self.engine: Engine | None = None
        self._activation = activation

    def _add_experts(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Make the parameters, without values."""
        n_local, shape = self.expert_map.n_local, self.shape
        sizes = (n_local, shape.in_rows, shape.d_model), (n_local, shape.d_model, shape.d_hidden)
        self.w_in, self.w_out = (
            nn.Parameter(torch.empty(size, device=device, dtype=dtype)) for size in sizes
        )

    @torch.no_grad()
    def init_experts(self) -> None:
        """Draw the initial weights of the parameters, the same ones each time."""
        record = self.w_in.new_empty(self.shape.numel)
        w_in, w_out = split_record(record, self.shape)
        for position, index in enumerate(self.expert_map.local_ids):
            self.init_expert(index, record)
            self.w_in[position].copy_(w_in)
            self.w_out[position].copy_(w_out)

    def init_expert(self, index: int, out_record: Tensor) -> None:
        """Fill the flat record of one expert with its initial weights."""
        generator = expert_generator(self.seed, ExpertId(self.layer, index), out_record.device)
        init_expert_(out_record, self.shape, self.n_layers, generator)

    # -- offloading, see `ExpertLayer` --------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self.w_in.dtype if self.engine is None else self.engine.dtype

    @property
    def trained(self) -> bool:
        return self.w_in.requires_grad

    def activation(self) -> Activation | None:
        """The function between the two matrices; None: the usual one."""
        return self._activation

    def expert_parameters(self) -> list[nn.Parameter]:
        return [self.w_in, self.w_out]

    def fill(self, index: int, record: Tensor, device: torch.device) -> None:
        """Write the weights of one expert to its flat record. If the parameters are on the meta
        device, initial weights are drawn on `device`, which may be faster."""
        if index not in self.expert_map.local_ids:
            raise ConfigError(
                f"expert {index} is on another rank of the layer's mesh; give the same mesh to "
                "overspill.offload"
            )
        if self.w_in.is_meta:
            scratch = torch.empty_like(record, device=device)
            self.init_expert(index, scratch)
            record.copy_(scratch)
            return
        w_in, w_out = split_record(record, self.shape)
        position = self.expert_map.position(index)
        w_in.copy_(self.w_in[position].detach())
        w_out.copy_(self.w_out[position].detach())

    def give_away(self, engine: Engine, layer: int) -> None:
        """Replace the parameters by a placeholder; the experts are in the engine now."""
        self._replace(engine, ExpertPlaceholder(engine, layer, self._activation))

    def _replace(self, engine: Engine, placeholder: ExpertPlaceholder | OthersPlaceholder) -> None:
        placeholder.requires_grad_(self.trained)
        self.engine = engine
        del self.w_in, self.w_out
        self.experts = cast(ExpertPlaceholder, placeholder)
        show_experts(self, "experts", stacked(("w_in", "w_out")))
        refuse_replicas(self)
