"""Adapts an offloaded Hugging Face model: its experts, its loss, `num_parameters`, `to`,
`save_pretrained` and `load_state_dict`."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import OrderError
from overspill.models.huggingface import loss, state
from overspill.models.huggingface.dictionaries import NLLB, style_of, warn_of_routing
from overspill.models.huggingface.expert_adapters import named_parameters, warns_of_left_out
from overspill.models.huggingface.experts import (
    PLACEHOLDER,
    DictionaryExperts,
    HuggingFaceExperts,
    StackedExperts,
)
from overspill.models.joint_writing import is_first
from overspill.moe.autograd import routed_experts
from overspill.moe.engine import Engine
from overspill.moe.placeholder import ExpertPlaceholder, check_placeholder
from overspill.moe.pregate import check_selected

IMPLEMENTATION = "overspill"


def adapt(model: Any, layers: Sequence[HuggingFaceExperts]) -> Any:
    """Make a model whose experts were given away call the engine. Returns the model."""
    register()
    first = layers[0]
    if isinstance(first, DictionaryExperts):
        expert = f"{first.path}.{first.keys[0]}"
        check = warns_of_left_out(model, expert, first.style.linears)
        first.module.before_forward = check  # type: ignore[assignment]
    if isinstance(first, StackedExperts):
        model.set_experts_implementation(IMPLEMENTATION)
    elif style_of(layers[0].module) is NLLB and is_first(model.overspill):
        warn_of_routing(model.overspill.settings)
    loss.install(model)
    state.accept_checkpoint_names(model)
    # instance attributes keep the user's class; they refer to the model weakly, so that it is
    # freed with its last reference
    own = weakref.ref(model)
    plain = type(model)
    model.num_parameters = functools.partial(_num_parameters, own, plain.num_parameters)
    model.named_parameters = functools.partial(named_parameters, own, plain.named_parameters)
    model._apply = functools.partial(_checked_apply, own, plain._apply)
    model.save_pretrained = functools.partial(_save_pretrained, own)
    return model


def register() -> None:
    """Registers `experts_implementation="overspill"` with transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, _experts_forward)


def _experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    placeholder: ExpertPlaceholder | None = getattr(module, PLACEHOLDER, None)
    if placeholder is None:
        raise OrderError(
            f"{type(module).__name__} has experts_implementation='overspill', but its experts are "
            "not offloaded; call overspill.offload(model) or overspill.load(path)"
        )
    check_placeholder(placeholder)
    check_selected(module, top_k_index)
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1]).to(placeholder.engine.dtype)
    top_k = top_k_index.shape[-1]
    y_TD = routed_experts(
        placeholder, x_TD, top_k_index.reshape(-1, top_k), top_k_weights.reshape(-1, top_k)
    )
    return y_TD.to(hidden_states.dtype).view_as(hidden_states)


def _num_parameters(
    own: Callable[[], Any],
    plain: Callable[..., int],
    only_trainable: bool = False,
    exclude_embeddings: bool = False,
) -> int:
    """Count parameters like transformers, with the offloaded experts."""
    model = own()
    engine: Engine = model.overspill
    placeholders = [p for p in model.parameters() if hasattr(p, "is_expert_placeholder")]
    counted = [p for p in placeholders if p.requires_grad or not only_trainable]
    return (
        plain(model, only_trainable, exclude_embeddings)
        + len(counted) * engine.n_experts * engine.shape.numel
    )


def _checked_apply(
    own: Callable[[], Any], plain: Callable[..., Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    """Apply `function` for `.to()`, `.half()` and similar methods. Raises if they would change the
    device or dtype, since the experts cannot follow."""
    model = own()
    engine: Engine = model.overspill
    probe = function(torch.empty(0, dtype=engine.dtype, device=engine.device))
    if probe.dtype != engine.dtype or probe.device != engine.device:
        raise OrderError(
            f"this model's experts are {engine.dtype} for {engine.device}, and cannot become "
            f"{probe.dtype} on {probe.device} after offloading; give dtype= and device= to "
            "overspill.load (or convert the model before overspill.offload)"
        )
    return plain(model, function, *args, **kwargs)


def _save_pretrained(own: Callable[[], Any], save_directory: Any, **kwargs: Any) -> None:
    from overspill.models.huggingface.save import save_pretrained

    save_pretrained(own(), save_directory, **kwargs)
