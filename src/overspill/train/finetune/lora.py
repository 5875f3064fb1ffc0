"""LoRA adapters for the dense part of a model and its experts, with peft."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import nn

from overspill.core.errors import ConfigError
from overspill.models.huggingface.expert_adapters import stand_ins
from overspill.models.huggingface.find_experts import experts_paths
from overspill.models.huggingface.pregate_file import save_beside_adapter, trained_pregates
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.train.finetune.config import FinetuneModelSection


def check_peft() -> None:
    """Raises an error if peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--lora needs peft, which is not installed; run pip install '.[lora]' in the "
            "checkout of Overspill"
        ) from error


def add_lora(model: nn.Module, section: FinetuneModelSection, seq2seq: bool) -> nn.Module:
    """The model with adapters; everything else is frozen."""
    from peft import LoraConfig, get_peft_model

    assert section.lora is not None
    targets, experts = lora_targets(model, section)
    rank = section.lora_experts_rank if experts else None
    alpha = section.lora_alpha or 2 * section.lora
    config = LoraConfig(
        r=section.lora,
        lora_alpha=alpha,
        target_modules=targets,
        target_parameters=experts or None,
        rank_pattern=dict.fromkeys(experts, rank) if rank else {},
        alpha_pattern=dict.fromkeys(experts, alpha * rank / section.lora) if rank else {},
        task_type="SEQ_2_SEQ_LM" if seq2seq else "CAUSAL_LM",
    )
    # peft notes the family of the base only without a task
    config.auto_mapping = {
        "base_model_class": type(model).__name__,
        "parent_library": type(model).__module__,
    }
    with _patterns_known():
        adapted: Any = get_peft_model(model, config)
    if section.checkpoint:
        config.base_model_name_or_path = _base_name(section.checkpoint)
    return cast(nn.Module, adapted)


def lora_targets(model: nn.Module, section: FinetuneModelSection) -> tuple[list[str], list[str]]:
    """Names of the linear layers and of the stacks of experts that get adapters."""
    if section.lora_targets is None:
        targets = attention_layers(model)
    else:
        targets = [name.strip() for name in section.lora_targets.split(",") if name.strip()]
        _check_targets(model, targets)
    return targets, expert_stacks(model) if section.lora_experts else []


@contextmanager
def _patterns_known() -> Iterator[None]:
    """Hide a warning of peft: it says that patterns of ranks match no module if they match
    parameters."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys")
        yield


def expert_stacks(model: nn.Module) -> list[str]:
    """Ends of the names of the stacks of experts, for peft's `target_parameters`."""
    found = {
        f"{'.'.join(path.split('.')[-2:])}.{name}": None
        for path in experts_paths(model)
        for name, parameter in _own_parameters(model.get_submodule(path)).items()
        if parameter.dim() == 3
    }
    if not found:
        raise ConfigError(
            "--lora-experts does not support this model, whose experts are separate modules; drop "
            "it"
        )
    return list(found)


def _own_parameters(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the module of the experts itself, without the placeholder of offloaded experts.
    There are none if each expert is a module."""
    own = stand_ins(experts) or dict(experts.named_parameters(recurse=False))
    return {name: p for name, p in own.items() if not isinstance(p, ExpertPlaceholder)}


def _base_name(checkpoint: str) -> str:
    """A name that an adapter's config stores for its base model: valid in any folder, and the
    repository instead of its copy in a cache."""
    path = Path(checkpoint).expanduser()
    return str(path.absolute()) if path.exists() else checkpoint


def attention_layers(model: nn.Module) -> list[str]:
    """Full names of all linear layers in attention modules."""
    inside = [
        name for name, module in model.named_modules() if "Attention" in type(module).__name__
    ]
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(name.startswith(f"{at}.") for at in inside)
    ]
    if not found:
        raise ConfigError(
            "--lora: this model has no linear layers in attention; name others with --lora-targets"
        )
    return found


def _check_targets(model: nn.Module, targets: list[str]) -> None:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"--lora-targets {target} is not a linear layer of this model; it has "
                f"{', '.join(known)}"
            )


def save_adapter(model: Any, folder: Path) -> None:
    """Saves the adapter, and the pre-gates that are trained with it. Its tensors are passed
    explicitly: peft would otherwise read the state dict of the whole model, every expert
    included."""
    gates = {id(parameter) for parameter in trained_pregates(model)}
    tensors = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in gates
    }
    model.save_pretrained(str(folder), state_dict=tensors, save_embedding_layers=False)
    if gates:
        save_beside_adapter(model.get_base_model(), folder)
