"""A GPT-MoE as a Mixtral: the same arithmetic with other tensor names.

With gated experts in every layer and normalized routing weights, `GPTMoE` computes what
`MixtralForCausalLM` computes, so every tensor of the Mixtral is a contiguous part of a tensor of
the GPT-MoE. The names are those of the published Mixtral, with one tensor per matrix of an expert,
which every version of transformers and the serving engines read.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig


@dataclass(frozen=True)
class Piece:
    """Where the GPT-MoE has a tensor of the Mixtral."""

    source: str
    offset: int
    """In elements of the source."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def check_exportable(config: GPTConfig) -> None:
    """Raises for a model that no class of transformers computes."""
    needs = "Hugging Face has no class for a model with"
    if not config.gated:
        raise ConfigError(f"{needs} GELU experts (gated=False); train with --gated to export")
    if config.moe_every != 1:
        raise ConfigError(
            f"{needs} dense layers between MoE layers (moe_every={config.moe_every}); train with "
            "--moe-every 1 to export"
        )
    # Mixtral always normalizes: with one expert per token its weights are 1, here the probability.
    if config.top_k == 1 and config.n_experts > 1:
        raise ConfigError(
            f"{needs} one expert per token, weighted by its probability (top_k=1); train with "
            "--top-k 2 to export"
        )
    if not config.normalize_weights and config.top_k < config.n_experts:
        raise ConfigError(
            f"{needs} routing weights that do not sum to 1 (normalize_weights=False); train with "
            "normalize_weights=True to export"
        )


def mixtral_config(config: GPTConfig, dtype: str, separator: int | None) -> dict[str, Any]:
    """The content of config.json; `separator` ends a text."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": dtype,
        "vocab_size": config.vocab,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_hidden,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_heads,
        "head_dim": config.d_model // config.n_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # read by versions before transformers 5
        "sliding_window": None,
        "attention_dropout": 0.0,
        "num_local_experts": config.n_experts,
        "num_experts_per_tok": config.top_k,
        # Mixtral averages over layers a loss that is top_k for an even load; GPT-MoE sums losses
        # that are 1.
        "router_aux_loss_coef": config.balance_coef * config.n_layers / config.top_k,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": separator,
        "pad_token_id": separator,
    }


def mixtral_tensors(config: GPTConfig) -> dict[str, Piece]:
    """Every tensor of the checkpoint, in the order of the layers."""
    d, table = config.d_model, (config.vocab, config.d_model)
    tensors = {"model.embed_tokens.weight": Piece("embedding.weight", 0, table)}
    for layer in range(config.n_layers):
        tensors |= _layer_tensors(config, f"blocks.{layer}", f"model.layers.{layer}")
    tensors["model.norm.weight"] = Piece("norm.weight", 0, (d,))
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = Piece("head.weight", 0, table)
    return tensors


def _layer_tensors(config: GPTConfig, block: str, layer: str) -> dict[str, Piece]:
    d, n_experts = config.d_model, config.n_experts
    moe = f"{layer}.block_sparse_moe"
    tensors = {
        f"{layer}.input_layernorm.weight": Piece(f"{block}.attention_norm.weight", 0, (d,)),
        f"{layer}.self_attn.o_proj.weight": Piece(f"{block}.attention.out.weight", 0, (d, d)),
        f"{layer}.post_attention_layernorm.weight": Piece(f"{block}.feed_norm.weight", 0, (d,)),
        f"{moe}.gate.weight": Piece(f"{block}.moe.router.weight", 0, (n_experts, d)),
    }
    for position, name in enumerate("qkv"):
        tensors[f"{layer}.self_attn.{name}_proj.weight"] = Piece(
            f"{block}.attention.qkv.weight", position * d * d, (d, d)
        )
    h, matrix = config.d_hidden, config.d_hidden * d
    for index in range(n_experts):
        expert = f"{moe}.experts.{index}"
        # w_in consists of the gate rows, then the up rows.
        tensors[f"{expert}.w1.weight"] = Piece(f"{block}.moe.w_in", 2 * index * matrix, (h, d))
        tensors[f"{expert}.w3.weight"] = Piece(
            f"{block}.moe.w_in", (2 * index + 1) * matrix, (h, d)
        )
        tensors[f"{expert}.w2.weight"] = Piece(f"{block}.moe.w_out", index * matrix, (d, h))
    return tensors
