"""The config of an exported GPT-MoE. Importing this registers it with `AutoConfig`, and making a
config registers the model."""

import importlib
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig


@strict
class OverspillGPTConfig(PreTrainedConfig):  # type: ignore[misc]
    """A `GPTConfig` in the terms of transformers, with the names of Mixtral."""

    model_type = "overspill_gpt"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {"num_experts": "num_local_experts"}  # noqa: RUF012

    vocab_size: int = 32_000
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    """Number of heads of keys and values, equal to the attention heads; for programs that read
    it."""
    max_position_embeddings: int = 1024
    rope_parameters: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    gated: bool = False
    """Gated experts with three matrices; otherwise two."""
    hidden_act: str = "gelu"
    """"silu" for gated experts."""
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    """With more than one expert per token, scale their weights to sum to 1."""
    moe_every: int = 1
    """Every n-th block has experts; the others have one dense feed-forward of the same shape."""
    router_aux_loss_coef: float = 0.01
    """Weight of the balance loss of each MoE block."""
    output_router_logits: bool = False
    """Add the balance losses to the loss."""
    initializer_range: float = 0.02
    sliding_window: int | None = None
    """Always None; for programs that read it."""
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)
        importlib.import_module("overspill.models.huggingface.gpt_model")

    def is_moe(self, layer: int) -> bool:
        """Return whether a block, counted from 0, has experts."""
        return (layer + 1) % self.moe_every == 0


AutoConfig.register("overspill_gpt", OverspillGPTConfig)
