"""Tiny models as GGUF files, with the types of weights that such files mix."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import overspill
from tests.models.huggingface.families import Family, make_model, tiny
from tests.models.huggingface.gguf.writer import Choose, write_gguf
from tests.models.huggingface.oracle import budgets

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0} | {
    "original_max_position_embeddings": 16
}


@dataclass(frozen=True)
class Case:
    """A family, and what is set in its config."""

    model_type: str
    experts: tuple[str, str, str]
    """The types of gate, up and down."""
    config: dict[str, Any] = field(default_factory=dict)
    fused: bool = False
    old: bool = False
    """One tensor for each expert, as in files of Mixtral from before April 2024."""


PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GROUPS = {"kv_lora_rank": 32, "n_group": 2, "topk_group": 1}
CASES = {
    "qwen3moe": Case("qwen3_moe", ("Q4_0", "Q8_0", "IQ4_NL"), {"norm_topk_prob": True}),
    "qwen3moe-k": Case(
        "qwen3_moe",
        ("Q4_K", "Q5_K", "Q6_K"),
        {"norm_topk_prob": True, "hidden_size": 256, "moe_intermediate_size": 256}
        | {"num_experts": 2, "num_hidden_layers": 1},
    ),
    "qwen2moe": Case("qwen2_moe", ("Q8_0", "Q8_0", "F16"), {"tie_word_embeddings": True}),
    "mixtral": Case("mixtral", ("IQ4_NL", "IQ4_NL", "Q4_0"), {"sliding_window": None}),
    "mixtral-old": Case("mixtral", ("Q4_0", "Q4_0", "Q8_0"), {"sliding_window": None}, old=True),
    "gpt-oss": Case("gpt_oss", ("MXFP4", "MXFP4", "MXFP4"), {"rope_parameters": YARN}),
    "gpt-oss-q8": Case("gpt_oss", ("Q8_0", "Q8_0", "Q4_0"), {"rope_parameters": YARN}),
    "gpt-oss-mixed": Case("gpt_oss", ("Q8_0", "BF16", "Q4_0"), {"rope_parameters": YARN}),
    "deepseek-v2": Case(
        "deepseek_v2",
        ("Q4_0", "Q4_0", "Q5_1"),
        {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None}
        | {"kv_lora_rank": 32},
    ),
    "deepseek-v3": Case(
        "deepseek_v3",
        ("Q4_0", "Q4_0", "Q8_0"),
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, **GROUPS},
        fused=True,
    ),
    "glm4moe": Case(
        "glm4_moe",
        ("Q8_0", "Q8_0", "Q8_0"),
        {"use_qk_norm": True, "attention_bias": True, "rope_parameters": PARTIAL},
    ),
    "olmoe": Case("olmoe", ("BF16", "F16", "F32"), {"num_key_value_heads": 4}),
    "minimax-m2": Case("minimax_m2", ("Q4_0", "Q4_0", "Q8_0"), {"rope_parameters": PARTIAL}),
}


def make_case(
    case: Case, path: Path, choose: Choose | None = None, **split: int
) -> tuple[Family, Any]:
    """Writes the file; returns the family, and the model with the values that are stored. `choose`
    may give tensors other types than the case."""
    inner = "moe_intermediate_size" in tiny(case.model_type).to_dict()
    sizes = {"hidden_size": 64} | ({"moe_intermediate_size": 32} if inner else {})
    sizes |= {"intermediate_size": 64 if inner else 32}
    family = Family(case.model_type, lambda: tiny(case.model_type, **(sizes | case.config)))
    model: Any = make_model(family).eval()
    write_gguf(model, path, choose or _choose(case), case.fused, case.old, **split)
    return family, model


def _choose(case: Case) -> Choose:
    """Experts as the case says; norms, biases and routers in float32, others in turn."""
    others = ("Q8_0", "IQ4_NL", "BF16", "F16", "Q4_0")

    def choose(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) == 1 or "norm" in name or "inp" in name or not name.endswith("weight"):
            return "F32"
        if "exps" in name:
            return case.experts[2 if "down" in name else 1 if "_up_" in name else 0]
        return "F16" if shape[-1] % 32 else others[sum(map(ord, name)) % len(others)]

    return choose


def mixed(name: str, shape: tuple[int, ...]) -> str:
    """Types as in files of llama.cpp, which give some layers more bits: records of the second layer
    are larger."""
    if len(shape) == 1 or "inp" in name or "exps" not in name:
        return "F32"
    return ("Q8_0" if "down" in name else "Q4_0") if "blk.1." in name else "IQ4_NL"


def load(path: Path, mode: str = "host", **more: Any) -> Any:
    given = budgets(mode, path.parent / "spill") | {"dtype": torch.float32, "train": False}
    return overspill.load(path, **(given | more))
