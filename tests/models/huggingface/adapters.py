"""LoRA adapters that peft makes, on tiny models, in folders."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from overspill.models.huggingface.find_experts import experts_paths
from tests.models.huggingface.families import Family, make_model


class Adapted(NamedTuple):
    base: Path
    folder: Path
    model: Any
    """The model of peft."""


def make_adapter(
    family: Family, folder: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> Adapted:
    """A model in `folder`/base and an adapter of it in `folder`/adapter, all of whose tensors are
    random. Without target_modules it is for all dense linear layers that peft takes as such."""
    model = make_model(family, dtype=dtype).eval()
    model.save_pretrained(folder / "base")
    return save_adapter(model, folder, folder / "base", **options)


def save_adapter(model: Any, folder: Path, base: Path, **options: Any) -> Adapted:
    """An adapter of a model in `folder`/adapter, which says that the model is in `base`."""
    peft: Any = pytest.importorskip("peft")
    given = {"r": 3, "lora_alpha": 7, "init_lora_weights": False, **options}
    given.setdefault("target_modules", dense_layers(model))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**given)).eval()
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn(parameter.shape).to(parameter.dtype)
        adapted.peft_config["default"].base_model_name_or_path = str(base)
        adapted.save_pretrained(folder / "adapter")
    return Adapted(base, folder / "adapter", adapted)


def dense_layers(model: Any) -> list[str]:
    """Not the ones that peft takes for experts of earlier versions of transformers, and for a part
    of Mamba."""
    experts = tuple(f"{path}." for path in experts_paths(model))
    others = ("gate", "gate_proj", "up_proj", "down_proj", "out_proj", "lm_head")
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and not name.startswith(experts)
        and name.rpartition(".")[2] not in others
    ]


def merged_by_peft(adapted: Adapted) -> dict[str, torch.Tensor]:
    """Unloads the adapter of the model."""
    state: dict[str, torch.Tensor] = adapted.model.merge_and_unload().state_dict()
    return state
