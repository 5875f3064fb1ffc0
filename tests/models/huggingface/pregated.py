"""The oracle of pre-gates: gates of a plain transformers model that are called by hand."""

import dataclasses
from functools import partial
from typing import Any

from overspill.models.pregate import find_chains
from overspill.moe.pregate import GatedBlock
from tests.models.huggingface.families import FAMILIES, Family, tiny

_DEEP: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 4},
    "qwen3_moe": {"num_hidden_layers": 5},
    "deepseek_v3": {"num_hidden_layers": 5},
    "gpt_oss": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "switch_transformers": {
        "num_layers": 4,
        "num_sparse_encoder_layers": 4,
        "num_decoder_layers": 4,
        "num_sparse_decoder_layers": 4,
    },
    "nllb-moe": {
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_sparse_step": 1,
        "decoder_sparse_step": 1,
    },
}


def deep(family: Family) -> Family:
    """The family with four MoE blocks in each stack."""
    build = family.build
    assert isinstance(build, partial)
    changed = build.keywords | _DEEP[family.name]
    return dataclasses.replace(family, build=partial(tiny, family.name, **changed))


DEEP = tuple(deep(family) for family in FAMILIES if family.name in _DEEP)


def call_by_hand(model: Any, level: int) -> Any:
    """Makes block m of a plain model ask the gate of block m + level on its own gate's input."""
    for chain in find_chains(model):
        _call_by_hand(chain, level)
    return model


def _call_by_hand(chain: list[GatedBlock], level: int) -> None:
    results: dict[int, Any] = {}
    plain = [block.gate.forward for block in chain]

    def forward(number: int, hidden: Any, *others: Any) -> Any:
        gate: Any = chain[number].gate
        in_place = gate.training and getattr(gate, "jitter_noise", 0) > 0
        own_input = hidden.clone() if in_place else hidden
        if number < level:
            results[number] = plain[number](hidden, *others)
        if number + level < len(chain):
            later = chain[number + level].block
            for name in ("e_score_correction_bias", "expert_bias"):
                if others and hasattr(later, name):
                    others = (getattr(later, name),)
            if type(chain[number].gate) is not type(chain[number + level].gate):
                others = ()  # deepseek_v4: only the first kind needs the tokens
            results[number + level] = plain[number + level](own_input, *others)
        return results.pop(number)

    for number, block in enumerate(chain):
        block.gate.forward = partial(forward, number)  # type: ignore[method-assign]
