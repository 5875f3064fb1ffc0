"""Named model shapes. `moe-s` to `moe-xl` are those of Table 4 of the ES-MoE paper; `w1` is a model
of 5 B parameters in the shape of Mixtral; `nano` trains on two CPU cores in two minutes.
"""

import dataclasses
import difflib
from collections.abc import Collection
from typing import Any

from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig


def _es_moe(n_layers: int, d_model: int, d_hidden: int, n_heads: int) -> GPTConfig:
    return GPTConfig(
        vocab=51_200,
        n_layers=n_layers,
        d_model=d_model,
        d_hidden=d_hidden,
        n_heads=n_heads,
        n_experts=8,
        top_k=1,
    )


PRESETS: dict[str, GPTConfig] = {
    "nano": GPTConfig(
        vocab=264,  # 256 bytes and 8 special tokens
        n_layers=4,
        d_model=128,
        d_hidden=176,
        n_heads=4,
        n_experts=16,
        top_k=2,
        gated=True,  # can be exported, fine-tuned and given pre-gates
        max_seq=256,
    ),
    "moe-s": _es_moe(12, 768, 3072, 12),
    "moe-m": _es_moe(24, 1024, 4096, 16),
    "moe-l": _es_moe(24, 1536, 6144, 16),
    "moe-xl": _es_moe(24, 1536, 8192, 24),
    "w1": GPTConfig(
        vocab=32_000,
        n_layers=24,
        d_model=1024,
        d_hidden=4096,
        n_heads=16,
        n_experts=16,
        top_k=2,
        gated=True,
        tie_embeddings=False,
    ),
}


def get_preset(name: str, **overrides: Any) -> GPTConfig:
    """The preset `name` with some fields replaced."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not one of {_listed(PRESETS, name)}")
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    for key in overrides:
        if key not in fields:
            raise ConfigError(f"{key!r} is not one of a model's fields: {_listed(fields, key)}")
    return dataclasses.replace(PRESETS[name], **overrides)


def _listed(names: Collection[str], wrong: str) -> str:
    near = difflib.get_close_matches(wrong, names, n=1)
    return ", ".join(names) + (f"; did you mean {near[0]}?" if near else "")
