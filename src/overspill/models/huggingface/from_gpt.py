"""A GPT-MoE as a model of transformers: the same arithmetic with other tensor names. Every tensor
of that model is a contiguous part of a tensor of the GPT-MoE.

With gated experts in every layer and normalized routing weights, `GPTMoE` computes what
`MixtralForCausalLM` computes. The names are those of the published Mixtral, with one tensor per
matrix of an expert, which every version of transformers and the serving engines read. Any other
GPT-MoE is a `GPTMoEForCausalLM` (`gpt_model`), which transformers knows after `import overspill`.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from overspill.models.config import GPTConfig


@dataclass(frozen=True)
class Piece:
    """Part of a GPT-MoE tensor that is a tensor of the model of transformers."""

    source: str
    offset: int
    """Offset in elements of the source."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def is_mixtral(config: GPTConfig) -> bool:
    """Return whether Mixtral computes the same."""
    # Mixtral always normalizes: with one expert per token its weights are 1, here the probability.
    normalized = config.n_experts == config.top_k or (config.top_k > 1 and config.normalize_weights)
    return config.gated and config.moe_every == 1 and normalized


def exported_config(config: GPTConfig, dtype: str, separator: int | None) -> dict[str, Any]:
    """Return the content of config.json; `separator` is the token that ends a text."""
    shared = {
        "dtype": dtype,
        "vocab_size": config.vocab,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_heads,
        "max_position_embeddings": config.max_seq,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "sliding_window": None,
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.top_k,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": separator,
        "pad_token_id": separator,
    }
    return (_mixtral_config if is_mixtral(config) else _own_config)(config) | shared


def exported_tensors(config: GPTConfig) -> dict[str, Piece]:
    """Return every tensor of the checkpoint, in the order of the layers."""
    d, table = config.d_model, (config.vocab, config.d_model)
    of_experts = _mixtral_experts if is_mixtral(config) else _own_experts
    tensors = {"model.embed_tokens.weight": Piece("embedding.weight", 0, table)}
    for number in range(config.n_layers):
        block, layer = f"blocks.{number}", f"model.layers.{number}"
        tensors |= _attention_and_norms(config, block, layer)
        if config.is_moe(number):
            tensors |= of_experts(config, block, layer)
        else:
            tensors |= _dense(config, block, layer)
    tensors["model.norm.weight"] = Piece("norm.weight", 0, (d,))
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = Piece("head.weight", 0, table)
    return tensors


def _mixtral_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": config.d_model // config.n_heads,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,  # read by versions before transformers 5
        "attention_dropout": 0.0,
        # Mixtral averages over layers a loss that is top_k for an even load; GPT-MoE sums losses
        # that are 1.
        "router_aux_loss_coef": config.balance_coef * config.n_layers / config.top_k,
    }


def _own_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPTMoEForCausalLM"],
        "model_type": "overspill_gpt",
        "gated": config.gated,
        "hidden_act": "silu" if config.gated else "gelu",
        "moe_every": config.moe_every,
        "norm_topk_prob": config.normalize_weights,
        "router_aux_loss_coef": config.balance_coef,
    }


def _attention_and_norms(config: GPTConfig, block: str, layer: str) -> dict[str, Piece]:
    d = config.d_model
    tensors = {
        f"{layer}.input_layernorm.weight": Piece(f"{block}.attention_norm.weight", 0, (d,)),
        f"{layer}.self_attn.o_proj.weight": Piece(f"{block}.attention.out.weight", 0, (d, d)),
        f"{layer}.post_attention_layernorm.weight": Piece(f"{block}.feed_norm.weight", 0, (d,)),
    }
    for position, name in enumerate("qkv"):
        tensors[f"{layer}.self_attn.{name}_proj.weight"] = Piece(
            f"{block}.attention.qkv.weight", position * d * d, (d, d)
        )
    return tensors


def _mixtral_experts(config: GPTConfig, block: str, layer: str) -> dict[str, Piece]:
    d, h, matrix = config.d_model, config.d_hidden, config.d_hidden * config.d_model
    moe = f"{layer}.block_sparse_moe"
    tensors = {f"{moe}.gate.weight": Piece(f"{block}.moe.router.weight", 0, (config.n_experts, d))}
    for index in range(config.n_experts):
        expert = f"{moe}.experts.{index}"
        # w_in consists of the gate rows, then the up rows.
        tensors[f"{expert}.w1.weight"] = Piece(f"{block}.moe.w_in", 2 * index * matrix, (h, d))
        tensors[f"{expert}.w3.weight"] = Piece(
            f"{block}.moe.w_in", (2 * index + 1) * matrix, (h, d)
        )
        tensors[f"{expert}.w2.weight"] = Piece(f"{block}.moe.w_out", index * matrix, (d, h))
    return tensors


def _own_experts(config: GPTConfig, block: str, layer: str) -> dict[str, Piece]:
    w_in, w_out = config.expert_shape.sizes
    n_experts, name = config.n_experts, "gate_up_proj" if config.gated else "up_proj"
    return {
        f"{layer}.mlp.gate.weight": Piece(
            f"{block}.moe.router.weight", 0, (n_experts, config.d_model)
        ),
        f"{layer}.mlp.experts.{name}": Piece(f"{block}.moe.w_in", 0, (n_experts, *w_in)),
        f"{layer}.mlp.experts.down_proj": Piece(f"{block}.moe.w_out", 0, (n_experts, *w_out)),
    }


def _dense(config: GPTConfig, block: str, layer: str) -> dict[str, Piece]:
    w_in, w_out = config.expert_shape.sizes
    return {
        f"{layer}.mlp.up_proj.weight": Piece(f"{block}.dense.w_in.weight", 0, w_in),
        f"{layer}.mlp.down_proj.weight": Piece(f"{block}.dense.w_out.weight", 0, w_out),
    }
