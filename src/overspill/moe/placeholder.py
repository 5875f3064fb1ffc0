"""The parameter that takes the place of a layer's experts in an offloaded model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overspill.compute.activation import Activation
from overspill.core.errors import ConfigError, OrderError
from overspill.core.routing import RoutingSource
from overspill.moe.adapters import LayerAdapters
from overspill.moe.engine import Engine


class Place(NamedTuple):
    """The name and index of one tensor of an expert in the plain model."""

    name: str
    expert: int | None
    """The expert's index in a stack of all experts; None: the tensor is this expert's alone."""

    def of(self, tensor: Tensor) -> Tensor:
        """The expert's part of the plain model's tensor `name`."""
        return tensor if self.expert is None else tensor[self.expert]


Places = Callable[[int], Sequence[Place]]
"""The places of an expert's tensors, in the order of its record."""


def stacked(names: Sequence[str]) -> Places:
    """The places of tensors that hold all experts of a layer."""
    return lambda index: [Place(name, index) for name in names]


class ExpertPlaceholder(nn.Parameter):
    """Represents the experts of one layer among the parameters of an offloaded model.

    It has no elements, and three dimensions like a stack of experts, so that parameter groups by
    `p.dim()` treat it like one. An optimizer group that contains it updates the experts of its
    layer.
    """

    engine: Engine
    layer: int
    activation: Activation | None  # None: GELU or gated SiLU, by the shape of the experts
    places: Places | None  # locations of an expert's tensors in a Hugging Face model
    drops: bool  # whether the router may drop assignments
    top_k: int | None  # experts for each token, as of the last forward
    adapters: LayerAdapters | None  # for a forward that runs now
    is_expert_placeholder = True
    _source: RoutingSource | None
    _keeper: object
    _shown: "_GradientNorm | None"

    def __new__(
        cls,
        engine: Engine,
        layer: int,
        activation: Activation | None = None,
        places: Places | None = None,
        drops: bool = False,
    ) -> "ExpertPlaceholder":
        data = torch.empty(0, 0, 0, dtype=engine.dtype, device=engine.device)
        self = torch.Tensor._make_subclass(cls, data, True)
        self.engine, self.layer = engine, layer
        self.activation, self.places, self.drops = activation, places, drops
        self.top_k = None
        self.adapters = None
        self._source = None
        self._keeper = None
        self._shown = None
        return self

    def hold(self, keeper: object) -> None:
        """Refers to `keeper` as long as the placeholder lives: the engine is closed after that."""
        self._keeper = keeper

    @property
    def source(self) -> RoutingSource | None:
        """The routing source that replaces the model's router; None: none does."""
        return self._source

    @contextmanager
    def routed_by(self, source: RoutingSource) -> Iterator[None]:
        """Within the block, `source` selects the experts of this layer's tokens."""
        if source.n_layers < self.engine.n_layers:
            raise _mismatch("MoE layers", source.n_layers, self.engine.n_layers)
        if source.n_experts != self.engine.n_experts:
            raise _mismatch("experts per layer", source.n_experts, self.engine.n_experts)
        previous, self._source = self._source, source
        try:
            yield
        finally:
            self._source = previous

    def reroute(self, expert_ids_TK: Tensor) -> Tensor:
        """The expert ids of the routing source; without one, those of the router."""
        if self._source is None:
            return expert_ids_TK
        n_tokens, top_k = expert_ids_TK.shape
        if top_k != self._source.top_k:
            raise _mismatch("experts per token", self._source.top_k, top_k)
        return self._source(self.layer, n_tokens, expert_ids_TK.device)

    @property
    def grad(self) -> Tensor | None:
        """Not None if the layer has a gradient. The norms of the layers make a norm over the
        gradients of `model.parameters()` equal to that of the plain model, if experts are updated
        in step(). The gradients are stored elsewhere: this tensor must not be scaled."""
        if not self.engine.can_train:
            return None
        norm = self.engine.training.waiting_norm(self.layer)
        if norm is None:
            return None
        if self._shown is None or self._shown.shown_norm != norm:
            self._shown = _GradientNorm.of(self, norm)
        return self._shown

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise OrderError("experts get their gradients from backward; .grad cannot be set")
        self._shown = None
        if self.engine.can_train:
            self.engine.training.drop(self.layer)

    def check_gradient(self) -> None:
        """Raise if the tensor that `grad` has shown in this step was changed. Waits for the device
        if something was written to it."""
        shown, self._shown = self._shown, None
        if shown is None or shown._version == shown.made_version:
            return
        before = torch.tensor(shown.shown_norm, dtype=torch.float32).item()
        if shown.item() != before:  # a factor of 1 changes nothing
            raise OrderError(
                "gradients of experts cannot be changed in place, as clip_grad_norm_() does; give "
                "max_grad_norm to overspill.AdamW instead, which clips all parameters"
            )

    def __deepcopy__(self, memo: object) -> "ExpertPlaceholder":
        raise OrderError(
            "an offloaded model cannot be copied: its experts exist once, in the store; copy the "
            "model before overspill.offload, or load it a second time"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise OrderError(
            "an offloaded model cannot be pickled: its experts are in the store; save "
            "model.state_dict() (with torch.save) or call overspill.save(model, folder)"
        )


class OthersPlaceholder(nn.Parameter):
    """Represents the experts of a layer that other ranks have: parameters have the same order on
    all ranks, and checkpoints the same names. It never has a gradient."""

    engine: Engine
    places: Places | None  # as of an ExpertPlaceholder
    is_expert_placeholder = True
    layer = None

    def __new__(cls, engine: Engine, places: Places | None = None) -> "OthersPlaceholder":
        data = torch.empty(0, 0, 0, dtype=engine.dtype, device=engine.device)
        self = torch.Tensor._make_subclass(cls, data, True)
        self.engine, self.places = engine, places
        return self


def check_placeholder(found: Tensor) -> None:
    """Raise if something has taken the place of a placeholder."""
    if isinstance(found, OthersPlaceholder):
        raise OrderError(
            "other ranks have the experts of this layer, in another pipeline stage; let the model "
            "compute with overspill.Stages(model), on all ranks"
        )
    if not isinstance(found, ExpertPlaceholder):
        raise OrderError(
            f"the parameter of offloaded experts was replaced by a {type(found).__name__}, as FSDP "
            "does, which divides parameters among processes; load the model without it: Overspill "
            "places the model itself"
        )


class _GradientNorm(Tensor):
    """A norm that stands for a gradient; setting it to zero drops the gradient."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    placeholder: ExpertPlaceholder
    shown_norm: float
    made_version: int

    @staticmethod
    def of(placeholder: ExpertPlaceholder, norm: float) -> "_GradientNorm":
        # a fill, not a copy from the host, which would wait for the device
        data = torch.full((1,), norm, dtype=torch.float32, device=placeholder.engine.device)
        self: _GradientNorm = Tensor._make_subclass(_GradientNorm, data)
        self.placeholder, self.shown_norm, self.made_version = placeholder, norm, self._version
        return self

    def zero_(self) -> Tensor:
        self.placeholder.grad = None
        return super().zero_()

    def __deepcopy__(self, memo: object) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _mismatch(what: str, has: int, wants: int) -> ConfigError:
    return ConfigError(
        f"the routing source has {has} {what}, the model {wants}; give one made for the model"
    )
