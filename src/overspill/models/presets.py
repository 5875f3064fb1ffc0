"""Named shapes of GPT-MoE models. `nano` trains on two CPU cores in two minutes; `w1` is a model of
5 B parameters in the shape of Mixtral; the others are the models of three papers:

- `moe-s` to `moe-xl`: Table 4 of the ES-MoE paper.
- `aptmoe-*`: Table I of the APTMoE paper. It gives no number of heads: heads are 64 wide in
  `aptmoe-s-*` and 128 in the others.
- `mpipemoe-*`: Table III of the MPipeMoE paper, which gives only the MoE layer. Depth and heads
  are those of the models that it names, except that GPT-3 XL has 16 heads of 128 (24 do not divide
  its width). `mpipemoe-bert-l` is a decoder of that size, not an encoder.
"""

import dataclasses
import difflib
from collections.abc import Collection
from typing import Any

from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig


def _paper(
    n_layers: int, d_model: int, d_hidden: int, n_heads: int, n_experts: int = 8, top_k: int = 1
) -> GPTConfig:
    return GPTConfig(
        vocab=51_200,
        n_layers=n_layers,
        d_model=d_model,
        d_hidden=d_hidden,
        n_heads=n_heads,
        n_experts=n_experts,
        top_k=top_k,
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
    "moe-s": _paper(12, 768, 3072, 12),
    "moe-m": _paper(24, 1024, 4096, 16),
    "moe-l": _paper(24, 1536, 6144, 16),
    "moe-xl": _paper(24, 1536, 8192, 24),
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
    "mpipemoe-gpt3-s": _paper(12, 768, 3072, 12, n_experts=64),
    "mpipemoe-gpt3-xl": _paper(24, 2048, 8192, 16, n_experts=64),
    "mpipemoe-bert-l": _paper(24, 1024, 4096, 16, n_experts=64),
    "aptmoe-s-8": _paper(64, 1024, 4096, 16, n_experts=8, top_k=2),
    "aptmoe-s-16": _paper(64, 1024, 4096, 16, n_experts=16, top_k=2),
    "aptmoe-s-64": _paper(64, 1024, 4096, 16, n_experts=64, top_k=2),
    "aptmoe-m-8": _paper(64, 2048, 8192, 16, n_experts=8, top_k=2),
    "aptmoe-m-16": _paper(64, 2048, 8192, 16, n_experts=16, top_k=2),
    "aptmoe-l-8": _paper(64, 4096, 14336, 32, n_experts=8, top_k=2),
}


def get_preset(name: str, **overrides: Any) -> GPTConfig:
    """Return the preset `name` with some fields replaced."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is not one of {listed(PRESETS, name)}")
    fields = [field.name for field in dataclasses.fields(GPTConfig)]
    for key in overrides:
        if key not in fields:
            raise ConfigError(f"{key!r} is not one of a model's fields: {listed(fields, key)}")
    return dataclasses.replace(PRESETS[name], **overrides)


def listed(names: Collection[str], wrong: str) -> str:
    """Return a text with all names, and the names that are near a wrong one."""
    near = difflib.get_close_matches(wrong, names, n=3)
    return ", ".join(names) + (f"; did you mean {' or '.join(near)}?" if near else "")
