"""The config of a model of transformers from the metadata of a GGUF file. No torch.

Keys of metadata are those that llama.cpp writes for each architecture.
"""

from collections.abc import Callable
from typing import Any

from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.gguf.header import GgufHeader

_BESIDE = "put the config.json of the original model into the folder of the file"
_SIGMOID = 2
_GROUPS = {256: (8, 4), 160: (8, 3)}
"""Numbers of groups of experts, and of groups of a token, of DeepSeek-V3 and V2, by their number of
experts."""
_GLM_LITE = 154880
"""Vocabulary of GLM-4.7-Flash, whose files name the architecture of DeepSeek."""
_ENDS = (
    "<|im_end|>", "<|endoftext|>", "<|return|>", "<|call|>", "<|user|>", "<|observation|>",
    "<|eot_id|>",
)  # fmt: skip
_CONTROL = 3
_CHANGED = ("arctic", "bailingmoe", "granitehybrid", "granitemoe", "mistral3", "mistral4")
"""Unknown architectures with experts whose queries and keys llama.cpp reorders."""
_OPTIONAL = ("head_dim", "intermediate_size")
"""Fields whose defaults in transformers hold if metadata do not name them."""


def make_config(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of the model's config. Raises unless the model is a known
    Mixture-of-Experts model."""
    _, specific = _FAMILIES[_architecture(header)]
    config = _common(header) | specific(header)
    missing = [name for name, value in config.items() if value is _MISSING]
    if missing:
        raise CheckpointError(
            f"{header.path} has no {', '.join(missing)} in its metadata; {_BESIDE}"
        )
    absent = [name for name in _OPTIONAL if name in config and config[name] is None]
    return {name: value for name, value in config.items() if name not in absent}


def check_family(header: GgufHeader, model_type: object) -> None:
    """Raise if the tensors of a file do not belong to the config.json beside it. For an unknown
    architecture, this is only found when they are read."""
    _check_experts(header)
    known = _FAMILIES.get(header.architecture)
    if known is None and header.architecture in _CHANGED:
        raise ConfigError(
            f"{header.path} is a model of {header.architecture}, whose files have rows of queries "
            "and keys in another order than Overspill knows; give the checkpoint in safetensors"
        )
    if known is not None and model_type not in known[0]:
        raise ConfigError(
            f"{header.path} is a model of {header.architecture}, and the config.json beside it is "
            f"of {model_type}; move the file into a folder of its own, or put the config.json of "
            "the same model there"
        )


def is_known(architecture: str) -> bool:
    """Return whether the tensors of an architecture are known, and not only their usual names."""
    return architecture in _FAMILIES


def _check_experts(header: GgufHeader) -> None:
    if not header.get("expert_count"):
        raise ConfigError(
            f"{header.path} is a dense model ({header.architecture}): its metadata name no "
            "experts; give a Mixture-of-Experts checkpoint, of a family in docs/families.md"
        )


def _architecture(header: GgufHeader) -> str:
    """Raises if a config cannot be made of its metadata."""
    _check_experts(header)
    name = header.architecture
    if name not in _FAMILIES:
        raise ConfigError(
            f"{header.path} is a model of {name}; Overspill reads GGUF files of "
            f"{', '.join(_FAMILIES)}, and others only with config.json and tokenizer of the "
            "original model in their folder: put them there, or give the checkpoint in safetensors"
        )
    return name


class _Missing:
    pass


_MISSING = _Missing()


def _common(header: GgufHeader) -> dict[str, Any]:
    def get(key: str) -> Any:
        return header.get(key, _MISSING)

    heads = get("attention.head_count")
    return {
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": header.n_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "num_experts_per_tok": get("expert_used_count"),
        "rope_parameters": _rope(header),
        "vocab_size": _vocabulary(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(header),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _ends(header: GgufHeader) -> int | list[int] | None:
    """Return the tokens that end an answer: tokens that metadata name, and tokens with known
    names."""
    kinds = header.metadata.get("tokenizer.ggml.token_type", ())
    tokens = header.metadata.get("tokenizer.ggml.tokens", ())
    named = [
        header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")
    ]
    control = (number for number, kind in enumerate(kinds) if kind == _CONTROL)
    found = [number for number in control if number < len(tokens) and tokens[number] in _ENDS]
    every = list(dict.fromkeys(number for number in [*named, *found] if number is not None))
    return every[0] if len(every) == 1 else every or None


def _vocabulary(header: GgufHeader) -> Any:
    embedding = header.tensors.get("token_embd.weight")
    return _MISSING if embedding is None else embedding.shape[0]


def _rope(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of rotary positions, plain or scaled."""
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": header.get("rope.freq_base", 10000.0),
    }
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn") or "rope_freqs.weight" in header.tensors:
        raise ConfigError(
            f"{header.path} scales rotary positions in another way ({kind}); {_BESIDE}"
        )
    given = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
    }
    found = {name: header.get(f"rope.scaling.{key}") for name, key in given.items()}
    return rope | {"rope_type": kind} | {n: v for n, v in found.items() if v is not None}


def _qwen3_moe(header: GgufHeader) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "intermediate_size": header.get("feed_forward_length"),
        "moe_intermediate_size": header.get("expert_feed_forward_length", _MISSING),
        "num_experts": header.get("expert_count"),
        "head_dim": header.get("attention.key_length"),
        "norm_topk_prob": True,
    }


def _qwen2_moe(header: GgufHeader) -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        "intermediate_size": header.get("feed_forward_length"),
        "moe_intermediate_size": header.get("expert_feed_forward_length", _MISSING),
        "shared_expert_intermediate_size": header.get(
            "expert_shared_feed_forward_length", _MISSING
        ),
        "num_experts": header.get("expert_count"),
        "norm_topk_prob": False,
    }


def _mixtral(header: GgufHeader) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        "intermediate_size": header.get("feed_forward_length", _MISSING),
        "num_local_experts": header.get("expert_count"),
        "head_dim": header.get("attention.key_length", header.get("rope.dimension_count")),
    }


def _olmoe(header: GgufHeader) -> dict[str, Any]:
    return {
        "model_type": "olmoe",
        "intermediate_size": header.get("feed_forward_length", _MISSING),
        "num_experts": header.get("expert_count"),
        "norm_topk_prob": False,
    }


def _gpt_oss(header: GgufHeader) -> dict[str, Any]:
    rope = _rope(header)
    if rope["rope_type"] == "yarn":  # these are the same in all gpt-oss, and not in all files
        rope = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} | rope
    return {
        "model_type": "gpt_oss",
        "intermediate_size": header.get("expert_feed_forward_length", _MISSING),
        "num_local_experts": header.get("expert_count"),
        "head_dim": header.get("attention.key_length", _MISSING),
        "sliding_window": header.get("attention.sliding_window", _MISSING),
        "rope_parameters": rope,
    }


def _partial_rope(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of rotary positions of a part of each head."""
    size, heads = header.get("embedding_length", 0), header.get("attention.head_count", 1)
    head = header.get("attention.key_length", size // heads)
    rotated = header.get("rope.dimension_count", head)
    return _rope(header) | {"partial_rotary_factor": rotated / head}


def _minimax_m2(header: GgufHeader) -> dict[str, Any]:
    return {
        "model_type": "minimax_m2",
        "intermediate_size": header.get("expert_feed_forward_length", _MISSING),
        "num_local_experts": header.get("expert_count"),
        "head_dim": header.get("attention.key_length"),
        "rope_parameters": _partial_rope(header),
    }


def _routed(header: GgufHeader) -> dict[str, Any]:
    """Return the fields that families with dense first layers have in common."""
    return {
        "intermediate_size": header.get("feed_forward_length", _MISSING),
        "moe_intermediate_size": header.get("expert_feed_forward_length", _MISSING),
        "n_routed_experts": header.get("expert_count"),
        "n_shared_experts": header.get("expert_shared_count", _MISSING),
        "first_k_dense_replace": header.get("leading_dense_block_count", _MISSING),
        "routed_scaling_factor": header.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(header.get("expert_weights_norm", False)),
        "n_group": header.get("expert_group_count", 1),
        "topk_group": header.get("expert_group_used_count", 1),
        "num_nextn_predict_layers": 0,
    }


def _glm4_moe(header: GgufHeader) -> dict[str, Any]:
    return _routed(header) | {
        "model_type": "glm4_moe",
        "head_dim": header.get("attention.key_length"),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "rope_parameters": _partial_rope(header),
    }


def _deepseek(header: GgufHeader) -> dict[str, Any]:
    rotated = header.get("rope.dimension_count", 0)
    # old files have the sizes of the heads themselves, new ones sizes of shared keys and values
    head = header.get("attention.key_length_mla", header.get("attention.key_length", 0))
    value = header.get("attention.value_length_mla", header.get("attention.value_length", _MISSING))
    rope = _rope(header)
    log = header.get("rope.scaling.yarn_log_multiplier")
    if log is not None and rope["rope_type"] == "yarn":
        scale = round(log / 0.1, 4)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    if header.get("attention.temperature_scale") or _vocabulary(header) == _GLM_LITE:
        raise ConfigError(
            f"{header.path} is not a DeepSeek-V2 or V3, only named like it; {_BESIDE}"
        )
    config = _routed(header) | {
        "num_key_value_heads": header.get("attention.head_count", _MISSING),
        "q_lora_rank": header.get("attention.q_lora_rank"),
        "kv_lora_rank": header.get("attention.kv_lora_rank", _MISSING),
        "qk_rope_head_dim": rotated or _MISSING,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": value,
        "rope_parameters": rope,
    }
    sigmoid = header.get("expert_gating_func", 0) == _SIGMOID or any(
        name.endswith("exp_probs_b.bias") for name in header.tensors
    )
    if header.get("expert_group_count") is None:  # as in files from before November 2025
        groups = _GROUPS.get(config["n_routed_experts"], (1, 1))
        config |= dict(zip(("n_group", "topk_group"), groups, strict=True))
    if sigmoid:
        return config | {"model_type": "deepseek_v3"}
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return config | {"model_type": "deepseek_v2", "topk_method": method}


_Specific = Callable[[GgufHeader], dict[str, Any]]
_FAMILIES: dict[str, tuple[tuple[str, ...], _Specific]] = {
    "qwen3moe": (("qwen3_moe",), _qwen3_moe),
    "qwen2moe": (("qwen2_moe",), _qwen2_moe),
    "llama": (("mixtral",), _mixtral),
    "gpt-oss": (("gpt_oss",), _gpt_oss),
    "deepseek2": (("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _deepseek),
    "glm4moe": (("glm4_moe",), _glm4_moe),
    "olmoe": (("olmoe",), _olmoe),
    "minimax-m2": (("minimax_m2",), _minimax_m2),
}
"""Model types by the names of llama.cpp, with the fields that only these have."""
