"""Tiny models whose experts do not go through the experts interface, so none can take them over."""

from functools import partial
from typing import TYPE_CHECKING

from tests.models.huggingface.families import (
    EXPERT,
    EXPERTS,
    HIDDEN,
    SPARSE_AFTER_DENSE,
    TOP_K,
    VOCAB,
    Family,
    tiny,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _dbrx() -> "PreTrainedConfig":
    return tiny(
        "dbrx",
        d_model=HIDDEN,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={
            "hidden_size": HIDDEN,
            "ffn_hidden_size": EXPERT,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
        },
    )


def _longcat_flash() -> "PreTrainedConfig":
    return tiny(
        "longcat_flash",
        num_layers=2,
        ffn_hidden_size=40,
        expert_ffn_hidden_size=EXPERT,
        zero_expert_num=2,
        head_dim=4,
    )


def _step3p7() -> "PreTrainedConfig":
    text = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "moe_intermediate_size": EXPERT,
        "share_expert_dim": 20,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": 6,
        "pad_token_id": 0,
        **SPARSE_AFTER_DENSE,
    }
    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
    }
    return tiny("step3p7", text_config=text, vision_config=vision)


REFUSED: tuple[Family, ...] = (
    # Llama4TextExperts: gate_up_proj [E, H, 2I] and down_proj [E, I, H]
    Family(
        "llama4_text",
        partial(tiny, "llama4_text", intermediate_size=EXPERT),
        notes="every expert computes every token",
    ),
    # DbrxExperts.mlp, a DbrxExpertGLU: w1, v1, w2, each [E * I, H]
    Family("dbrx", _dbrx, notes="experts lie below each other in one matrix"),
    # JetMoeMoE: input_linear and output_linear, each a JetMoeParallelExperts with one weight
    # [E, out, in]; JetMoeMoA is the attention
    Family(
        "jetmoe",
        partial(tiny, "jetmoe", intermediate_size=EXPERT, kv_channels=8),
        notes="stacks of a class of its own, experts in attention too",
    ),
    # LongcatFlashExperts: gate_up_proj has rows for experts that do nothing, down_proj has none
    Family("longcat_flash", _longcat_flash, notes="some experts do nothing"),
    # Step3p7Experts: fused like the others and with a gate of its own, but not decorated
    Family(
        "step3p7", _step3p7, "AutoModelForImageTextToText", notes="stacks of a class of its own"
    ),
    # DogeCDMoE: down_embed and up_embed [E, H]
    Family(
        "doge",
        partial(tiny, "doge", is_moe=True, num_experts=16),
        notes="an expert is a row in each of two embeddings",
    ),
    # AriaExperts: fc1 and fc2, each an AriaGroupedExpertsGemm with one weight [E, in, out]
    Family(
        "aria_text",
        partial(tiny, "aria_text", intermediate_size=EXPERT),
        notes="stacks of a class of its own",
        until="5.22",
    ),
)
