"""The experts of one layer of a Hugging Face model, as `offload` sees them.

Two kinds: modules that go through transformers' experts interface, with stacked parameters, and
the module dictionaries of Switch and NLLB.
"""

import abc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overspill.compute.activation import Activation, Differentiated, Fused, function_of
from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertShape
from overspill.models.huggingface.dictionaries import (
    DROPOUT,
    DictionaryStyle,
    HostedDictionary,
)
from overspill.models.huggingface.expert_adapters import show_stand_ins
from overspill.moe.data_parallel import refuse_replicas
from overspill.moe.engine import Engine
from overspill.moe.placeholder import (
    ExpertPlaceholder,
    OthersPlaceholder,
    Place,
    Places,
    stacked,
)
from overspill.moe.state_dict import show_experts, split_record

PLACEHOLDER = "overspill"
"""The name of the placeholder among the parameters of an experts module."""


class HuggingFaceExperts(abc.ABC):
    """Experts of one module of a Hugging Face model; `places` are relative to it."""

    drops = False
    """Whether the router may drop assignments."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        places: Places,
        shape: ExpertShape,
        n_experts: int,
        std: float,
    ) -> None:
        self.path = path
        self.module = module
        self.places = places
        self.shape = shape
        self.n_experts = n_experts
        self._std = std
        first = self.expert_parameters()[0]
        self.dtype, self.trained = first.dtype, first.requires_grad

    @property
    def experts(self) -> ExpertPlaceholder:
        placeholder: ExpertPlaceholder = getattr(self.module, PLACEHOLDER)
        return placeholder

    @property
    def engine(self) -> Engine | None:
        placeholder = getattr(self.module, PLACEHOLDER, None)
        return None if placeholder is None else placeholder.engine

    @abc.abstractmethod
    def activation(self) -> Activation:
        """Return the function between the two matrices."""

    def expert_parameters(self) -> list[nn.Parameter]:
        names = {place.name: None for i in range(self.n_experts) for place in self.places(i)}
        own = dict(self.module.named_parameters())
        return [own[name] for name in names if name in own]

    def fill(self, index: int, record: Tensor, device: torch.device) -> None:
        """Copy the module's weights of an expert into its record."""
        own = dict(self.module.named_parameters())
        parts = split_record(record, self.shape)
        for place, part in zip(self.places(index), parts, strict=True):
            part.copy_(place.of(own[place.name]).detach())

    def draw(self, record: Tensor, generator: torch.Generator) -> None:
        """Write initial weights like transformers: normal, and zeros for biases."""
        for part in split_record(record, self.shape):
            if part.dim() == 1:
                part.zero_()
                continue
            drawn = torch.empty_like(part, device=generator.device)
            part.copy_(drawn.normal_(0.0, self._std, generator=generator))

    @abc.abstractmethod
    def strip(self) -> None:
        """Remove the parameters."""

    def give_away(self, engine: Engine, layer: int) -> None:
        """Replace the parameters, whose weights the engine has, by a placeholder."""
        activation = self.activation()  # before strip(): it may use the parameters
        self.strip()
        placeholder = ExpertPlaceholder(engine, layer, activation, self.places, self.drops)
        placeholder.requires_grad_(self.trained)
        self._register(placeholder)
        refuse_replicas(self.module)

    def leave_to_others(self, engine: Engine) -> None:
        """Replace the parameters of a layer that other ranks have by a placeholder for theirs."""
        self.strip()
        placeholder = OthersPlaceholder(engine, self.places)
        placeholder.requires_grad_(self.trained)
        self._register(placeholder)

    def _register(self, placeholder: ExpertPlaceholder | OthersPlaceholder) -> None:
        self.module.register_parameter(PLACEHOLDER, placeholder)
        show_experts(self.module, PLACEHOLDER, self.places, lazy=True)


class StackedExperts(HuggingFaceExperts):
    """Experts of transformers' interface: [E, ...] parameters, in any of its layouts."""

    def __init__(self, path: str, module: Any, std: float) -> None:
        self.gated = bool(module.has_gate)
        inward = "gate_up_proj" if self.gated else "up_proj"
        self.names = [inward, "down_proj"]
        if module.has_bias:
            self.names += [f"{inward}_bias", "down_proj_bias"]
        self._check(path, module)
        w_in, w_out = (getattr(module, name) for name in self.names[:2])
        n_experts, *in_size = w_in.shape
        in_rows, d_model = in_size[::-1] if module.is_transposed else in_size
        d_hidden = in_rows // 2 if self.gated else in_rows
        shape = ExpertShape(d_model, d_hidden, self.gated, module.has_bias, module.is_transposed)
        if tuple(w_out.shape[1:]) != shape.sizes[1]:
            raise ConfigError(
                f"{path}: down_proj of shape {list(w_out.shape)} does not lead back to the "
                f"{d_model} inputs of {inward}; such experts are not supported"
            )
        super().__init__(path, module, stacked(self.names), shape, n_experts, std)

    def _check(self, path: str, module: Any) -> None:
        kind = type(module).__name__
        if getattr(module, "has_post_expert_norm", False):
            raise ConfigError(f"{path} ({kind}) has a norm after each expert: not supported")
        if getattr(module, "_is_expert_parallel", False):
            raise ConfigError(f"{path} ({kind}) is split over ranks: load it without a tp_plan")
        for name, _ in module.named_parameters():
            if name not in self.names:
                raise ConfigError(f"{path} ({kind}) has an unknown parameter {name}: not supported")

    def activation(self) -> Activation:
        """Return a fused kernel if the module computes the same function, else the module's
        function."""
        from transformers.integrations import moe

        own: Any = self.module
        if not self.gated:
            return _plain_activation(own.act_fn)
        plain = type(own)._apply_gate is moe._default_apply_gate
        function = function_of(own.act_fn) if plain and own.is_concatenated else None
        if function is not None:
            return Fused(True, function)
        apply_gate = weakref.WeakMethod(own._apply_gate)  # the module will refer to this

        def gate(h: Tensor) -> Tensor:
            method = apply_gate()
            assert method is not None
            gated: Tensor = method(h)
            return gated

        kind = own.act_fn if plain else own  # its own way to apply gates
        return Differentiated(gate, f"gated {type(kind).__name__}")

    def _register(self, placeholder: ExpertPlaceholder | OthersPlaceholder) -> None:
        super()._register(placeholder)
        show_stand_ins(self.module, placeholder, self.places)

    def strip(self) -> None:
        for name in self.names:
            if name in self.module._parameters:
                delattr(self.module, name)
        # transformers must not initialize a module without parameters
        self.module._is_hf_initialized = True  # type: ignore[assignment]


def _plain_activation(function: Any) -> Activation:
    known = function_of(function)
    return Differentiated(function) if known is None else Fused(False, known)


class DictionaryExperts(HuggingFaceExperts):
    """Experts that are separate modules in a dictionary: Switch and NLLB."""

    drops = True  # tokens beyond an expert's capacity

    def __init__(
        self,
        path: str,
        module: nn.ModuleDict,
        style: DictionaryStyle,
        config: Any,
    ) -> None:
        self.style = style
        self.keys = expert_keys(module)
        first: Any = module[self.keys[0]]
        self._function = first.act
        self._dropout: float = first.dropout.p
        w_in = getattr(first, style.linears[0]).weight
        shape = ExpertShape(w_in.shape[1], w_in.shape[0], gated=False, bias=style.bias)
        places = _separate(self.keys, style)
        known = {place.name for index in range(len(self.keys)) for place in places(index)}
        for name, _ in module.named_parameters():
            if name not in known:  # that of an activation, for example
                owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
                raise ConfigError(
                    f"{path} has an unknown parameter {name} ({owner}): not supported"
                )
        super().__init__(path, module, places, shape, len(self.keys), style.std(config))

    def activation(self) -> Activation:
        return _plain_activation(self._function)

    def strip(self) -> None:
        assert isinstance(self.module, nn.ModuleDict)
        for key in self.keys:
            if key in self.module:
                del self.module[key]
        self.module._is_hf_initialized = True  # type: ignore[assignment]

    def give_away(self, engine: Engine, layer: int) -> None:
        super().give_away(engine, layer)
        # an own one, which follows train() and eval() from now on
        self.module.add_module(DROPOUT, nn.Dropout(self._dropout).train(self.module.training))
        self.module.__class__ = HostedDictionary.of(self.style)


def expert_keys(dictionary: nn.ModuleDict) -> tuple[str, ...]:
    return tuple(key for key in dictionary if key.startswith("expert_"))


def _separate(keys: Sequence[str], style: DictionaryStyle) -> Places:
    """Return the places of separate modules. Not a method: the module refers to this, and must not
    refer to itself."""
    kinds = ("weight", "bias") if style.bias else ("weight",)
    tails = [f"{linear}.{kind}" for kind in kinds for linear in style.linears]
    return lambda index: [Place(f"{keys[index]}.{tail}", None) for tail in tails]
