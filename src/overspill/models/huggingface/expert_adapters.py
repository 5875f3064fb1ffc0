"""peft adapters of offloaded experts: `LoraConfig(target_parameters=["mlp.experts.gate_up_proj"])`.

peft looks for parameters of the experts module itself, and wraps the module. Offloaded experts have
none, so the module shows peft stand-ins of the same shapes, which take no memory and are no
parameters of the model. Where peft would add an adapter to the whole stack of experts, its matrices
are handed to the computation of the experts instead.
"""

import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertId
from overspill.moe.adapters import Factors, LayerAdapters
from overspill.moe.placeholder import ExpertPlaceholder, OthersPlaceholder, Places
from overspill.moe.state_dict import split_record, stack_sizes

_log = logging.getLogger("overspill")
_LAYERS = "peft.tuners.lora.layer"
_ADOPTED = "_adds_to_offloaded_experts"


def show_stand_ins(
    module: nn.Module, placeholder: ExpertPlaceholder | OthersPlaceholder, places: Places
) -> None:
    """Give the module stand-ins for the experts' stacks, as attributes, and as parameters for
    peft's search for its targets. Nothing else sees them: not `model.parameters()`, state dicts,
    FSDP, or code that groups the parameters of each module."""
    engine, own = placeholder.engine, weakref.ref(module)
    stand_ins = {
        name: nn.Parameter(
            torch.zeros((), dtype=engine.dtype, device=engine.device).expand(size),
            requires_grad=False,
        )
        for name, size in stack_sizes(placeholder, places).items()
    }

    def named_parameters(
        prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        module = own()
        assert module is not None
        found = nn.Module.named_parameters(module, prefix, recurse, remove_duplicate)
        if recurse or not _asked_by("peft.tuners."):
            return found
        _adopt_wrappers()
        shown = [(f"{prefix}.{name}" if prefix else name, p) for name, p in stand_ins.items()]
        return itertools.chain(shown, found)

    # not with setattr, which would register parameters
    module.__dict__.update(stand_ins, named_parameters=named_parameters, _stand_ins=stand_ins)


def stand_ins(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return stand-ins for the parameters of an experts module, by name; an empty dictionary if it
    is not offloaded."""
    found: dict[str, nn.Parameter] = module.__dict__.get("_stand_ins", {})
    return found


def named_parameters(
    own: Callable[[], Any], plain: Callable[..., Any], *args: Any, **kwargs: Any
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the named parameters of an offloaded model. peft also gets the names of stand-ins when
    it looks for parameters that a regular expression matches."""
    model = own()
    found: Iterator[tuple[str, nn.Parameter]] = plain(model, *args, **kwargs)
    if not _asked_by("peft.utils.transformers_weight_conversion"):
        return found
    shown = [
        (f"{path}.{name}", parameter)
        for path, module in model.named_modules()
        for name, parameter in stand_ins(module).items()
    ]
    return itertools.chain(found, shown)


def _asked_by(package: str) -> bool:
    """Return whether the caller of the function that calls this is in package `package`."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(package)


def has_expert_adapters(model: nn.Module) -> bool:
    """Whether peft has wrapped offloaded experts."""
    wrappers = (each for each in model.modules() if hasattr(each, "parameter_name"))
    return any(hasattr(each, "lora_A") and _placeholder_of(each) is not None for each in wrappers)


def _adopt_wrappers() -> None:
    """Patch peft's wrappers of parameters for offloaded experts; other modules keep peft's own
    methods."""
    wrapper: Any = getattr(sys.modules.get(_LAYERS), "ParamWrapper", None)
    if wrapper is None or hasattr(wrapper, _ADOPTED):
        return
    replaced: dict[str, Callable[..., Any]] = {
        "_activate_lora": _activate,
        "merge": _merge,
        "unmerge": _unmerge,
    }
    if missing := [name for name in replaced if not hasattr(wrapper, name)]:
        raise ConfigError(
            f"adapters of offloaded experts need a version of peft whose ParamWrapper has "
            f"{missing[0]}, such as 0.21; run pip install --upgrade peft"
        )
    for name, method in replaced.items():
        setattr(wrapper, name, _dispatched(getattr(wrapper, name), method))
    setattr(wrapper, _ADOPTED, True)


def _dispatched(plain: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def method(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        placeholder = _placeholder_of(wrapper)
        if placeholder is None:
            return plain(wrapper, *args, **kwargs)
        return ours(wrapper, placeholder, *args, **kwargs)

    return method


def _placeholder_of(wrapper: Any) -> ExpertPlaceholder | None:
    """Return the placeholder of the experts that an adapter is for; None if they are not
    offloaded."""
    found = getattr(wrapper.get_base_layer(), "overspill", None)
    if isinstance(found, OthersPlaceholder):
        raise ConfigError(
            "adapters of experts in another pipeline stage are not supported; train them without "
            "stages"
        )
    return found if isinstance(found, ExpertPlaceholder) else None


@contextmanager
def _activate(
    wrapper: Any, placeholder: ExpertPlaceholder, active_adapters: Sequence[str]
) -> Iterator[None]:
    """Context in which forwards add the adapter to the products of the experts. Replaces peft's
    method, which adds it to the parameter."""
    active = [name for name in active_adapters if name in wrapper.lora_A]
    if len(active) > 1:
        raise ConfigError(
            f"{wrapper.parameter_name} has several active adapters ({', '.join(active)}); "
            "offloaded experts support one at a time: model.set_adapter(name)"
        )
    before = placeholder.adapters
    if active and any(placeholder.engine.layout.ranks):
        raise ConfigError(
            "the experts of this model have an adapter already, which LLM(adapter=...) has put "
            "beside their weights; merge it with overspill.merge, and load that"
        )
    if active:
        factors: list[Factors | None] = [None, None] if before is None else list(before.factors)
        factors[_matrix_of(wrapper, placeholder)] = _factors(wrapper, active[0])
        placeholder.adapters = LayerAdapters(factors)
    try:
        yield
    finally:
        placeholder.adapters = before


def _matrix_of(wrapper: Any, placeholder: ExpertPlaceholder) -> int:
    """Return the position of the adapted tensor in a record."""
    assert placeholder.places is not None
    names = [place.name for place in placeholder.places(0)]
    number = names.index(wrapper.parameter_name)
    if number > 1:
        raise ConfigError(
            f"target_parameters names {wrapper.parameter_name}, the biases of offloaded experts, "
            f"whose adapters are not supported; name {names[0]} and {names[1]} only"
        )
    return number


def _factors(wrapper: Any, adapter: str) -> Factors:
    """Return A [r * E, I] and B [O, r * E] as stacks of experts, as views."""
    a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    return Factors(
        a.reshape(wrapper.num_experts, -1, a.shape[1]),
        b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1),
        float(wrapper.scaling[adapter]),
    )


def _merge(
    wrapper: Any,
    placeholder: ExpertPlaceholder,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> None:
    from peft.tuners.tuners_utils import check_adapters_to_merge

    for name in check_adapters_to_merge(wrapper, adapter_names):
        if name in wrapper.lora_A:
            _add_to_records(placeholder, _matrix_of(wrapper, placeholder), _factors(wrapper, name))
            wrapper.merged_adapters.append(name)


def _unmerge(wrapper: Any, placeholder: ExpertPlaceholder) -> None:
    while wrapper.merged_adapters:
        factors = _factors(wrapper, wrapper.merged_adapters.pop())
        number = _matrix_of(wrapper, placeholder)
        _add_to_records(placeholder, number, factors._replace(scale=-factors.scale))


@torch.no_grad()
def _add_to_records(placeholder: ExpertPlaceholder, number: int, factors: Factors) -> None:
    """Add an adapter to the weights of all experts of a layer."""
    engine = placeholder.engine
    engine.check_whole("merging adapters of experts")
    engine.flush()
    if engine.can_train:
        engine.training.weights_loaded(placeholder.layer)
    for index in engine.experts.local_ids:

        def add(record: Tensor, index: int = index) -> None:
            weight = split_record(record, engine.shape)[number]
            weight.copy_(factors.added_to(weight, index, engine.shape.transposed))

        with engine.exclusive():
            engine.records.write_weights(ExpertId(placeholder.layer, index), add)


def warns_of_left_out(model: nn.Module, expert: str, linears: Sequence[str]) -> Callable[[], bool]:
    """Return a check for experts that are modules of their own in the plain model, like `expert`,
    whose layers peft does not find. The check warns if the adapters of the model were meant for
    them, and returns False while there are no adapters."""
    own = weakref.ref(model)

    def check() -> bool:
        model = own()
        configs = getattr(model, "peft_config", None)
        if model is None or not configs:
            return False
        for name, config in configs.items():
            if _means(model, config, [f"{expert}.{linear}" for linear in linears]):
                _log.warning(
                    "the adapter %s has no part in the experts of this model, which peft would "
                    "adapt on the plain one: experts that are separate modules (%s) support no "
                    "adapters while they are offloaded",
                    name,
                    " and ".join(linears),
                )
        return True

    return check


def _means(model: nn.Module, config: Any, names: Sequence[str]) -> bool:
    """Return whether peft would adapt modules of these names. It replaces "all-linear" by a list of
    the linear layers that it finds."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if any(check_target_module_exists(config, name) for name in names):
        return True
    head = getattr(model, "get_output_embeddings", lambda: None)()
    left_out = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and "lora_" not in name
        and not name.endswith(".base_layer")
    ]
    return not left_out and not isinstance(config.target_modules, str)
