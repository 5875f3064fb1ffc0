"""Tiny random Mixture-of-Experts models of Hugging Face, one per family.

Hidden size and expert size differ, so that a transposed weight shows; weights are not small, so
that a wrong one shows; nothing is dropped out, so that two runs agree.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HIDDEN, DENSE, EXPERT = 32, 40, 24
VOCAB, EXPERTS, TOP_K = 96, 4, 2
LAYERS = 2

# What these names mean in every configuration that has them. A family adds what differs.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE,
    "moe_intermediate_size": EXPERT,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_k": TOP_K,
    "moe_topk": TOP_K,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_intermediate_size": 20,
    "shared_expert_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "router_jitter_noise": 0.0,
    "attention_dropout": 0.0,
    # Multi-head latent attention
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # Sparse attention
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 16,  # with few, keys have the same score of 0
    # Linear attention
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
}


@dataclass(frozen=True)
class Family:
    """A model family: how to make a tiny one, and what is special about it."""

    name: str  # the model type
    build: Callable[[], "PreTrainedConfig"]
    auto: str = "AutoModelForCausalLM"
    since: str = "5.17"  # the first version of transformers that has it
    notes: str = ""
    until: str = "6"  # the first version in which this no longer holds

    @property
    def installed(self) -> bool:
        import transformers

        return Version(self.since) <= Version(transformers.__version__) < Version(self.until)


def cases(families: Iterable[Family]) -> list[Any]:
    """The families as parameters of a test; those of another version are skipped."""
    return [_case(family) for family in families]


def different_cases(families: Iterable[Family], *slow: str) -> list[Any]:
    """The same for a test of code that does the same for all families in `LIKE`: these are slow,
    and so are those named, which are like others in this test."""
    names = {*LIKE, *slow}
    return [_case(f, *([pytest.mark.slow] if f.name in names else [])) for f in families]


def _case(family: Family, *marks: pytest.MarkDecorator) -> Any:
    needs = f"{family.name} needs transformers >={family.since}, <{family.until}"
    skip = pytest.mark.skipif(not family.installed, reason=needs)
    return pytest.param(family, id=family.name, marks=[skip, *marks])


def tiny(model_type: str, **overrides: Any) -> "PreTrainedConfig":
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    names = {field.name for field in dataclasses.fields(config)}
    common = {name: value for name, value in COMMON.items() if name in names}
    if "kv_lora_rank" in names:
        common["num_key_value_heads"] = common["num_attention_heads"]  # as latent attention needs
    made: PreTrainedConfig = config(**(common | overrides))
    return made


def make_model(
    family: Family, seed: int = 0, dtype: torch.dtype = torch.float32
) -> "PreTrainedModel":
    """A model of the family whose every weight, bias and buffer of biases is random."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto = getattr(transformers, family.auto)
        model: PreTrainedModel = auto.from_config(
            family.build(),
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        with torch.no_grad():
            for tensor in _weights(model):
                # Added, not set: norms stay near one or zero, whichever is neutral there.
                tensor += (0.2 * torch.randn(tensor.shape)).to(tensor.dtype)
            for table in _routing_tables(model):
                table.copy_(torch.rand(len(table), EXPERTS).argsort(dim=1)[:, : table.shape[1]])
    return model


def _weights(model: "PreTrainedModel") -> list[Tensor]:
    biases = [tensor for name, tensor in model.named_buffers() if name.endswith("bias")]
    return list(model.parameters()) + [tensor for tensor in biases if tensor.is_floating_point()]


def _routing_tables(model: "PreTrainedModel") -> list[Tensor]:
    """Return the tables of the experts of each token; in a new model all tokens go to the first
    expert."""
    return [table for name, table in model.named_buffers() if name.endswith("tid2eid")]


def make_batch(family: Family, model: "PreTrainedModel", seed: int = 0) -> dict[str, Tensor]:
    """Two sequences of twelve tokens and their labels, some left out of the loss."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (2, 12), generator=random)
    labels = ids.clone()
    if family.auto == "AutoModelForSeq2SeqLM":
        labels = torch.randint(3, VOCAB, (2, 9), generator=random)
    if family.auto == "AutoModelForTokenClassification":
        labels = ids % model.config.num_labels
    labels[1, -2:] = -100
    return {"input_ids": ids, "labels": labels}


def _family(
    name: str,
    notes: str = "",
    *,
    auto: str = "AutoModelForCausalLM",
    since: str = "5.17",
    **overrides: Any,
) -> Family:
    return Family(name, partial(tiny, name, **overrides), auto, since, notes)


def _nested(
    name: str, notes: str = "", *, since: str = "5.17", text: Any = None, **others: Any
) -> Family:
    """A family whose language model is one part of several; `others` are settings of the rest."""

    def build() -> "PreTrainedConfig":
        return tiny(name, text_config=tiny(f"{name}_text", **(text or {})), **others)

    return Family(name, build, "AutoModelForImageTextToText", since, notes)


SPARSE_AFTER_DENSE = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"]}

FAMILIES: tuple[Family, ...] = (
    # Every layer sparse, experts of gate, up and down without biases
    _family("mixtral", intermediate_size=EXPERT),
    _family("olmoe", intermediate_size=EXPERT),
    _family("flex_olmo", intermediate_size=EXPERT),
    _family("granitemoe", intermediate_size=EXPERT),
    _family("phimoe", "sparsemixer router", intermediate_size=EXPERT),
    _family("minimax_m2", "correction bias", intermediate_size=EXPERT),
    _family("mellum"),
    _family("qwen3_moe", "dense layers between", num_hidden_layers=3, mlp_only_layers=[1]),
    # Shared experts beside the routed ones
    _family("qwen2_moe", "gated shared expert"),
    _family("granitemoeshared", "shared expert", intermediate_size=EXPERT),
    _family("granitemoe_swa", "shared expert", intermediate_size=EXPERT),
    _family("hunyuan_v1_moe", "shared expert", intermediate_size=EXPERT),
    _family("cohere2_moe", "shared experts", intermediate_size=EXPERT, logit_scale=1.0),
    _family("solar_open", "shared experts, correction bias"),
    _family("deepseek_v2", "shared experts", num_hidden_layers=3),
    _family(
        "deepseek_v3",
        "shared experts, expert groups, correction bias",
        num_hidden_layers=3,
        n_group=2,
    ),
    _family("deepseek_v32", "shared experts, sparse attention", num_hidden_layers=3),
    _family(
        "glm_moe_dsa",
        "shared experts, sparse attention",
        num_hidden_layers=3,
        indexer_types=["full", "shared", "full"],
    ),
    _family("glm4_moe", "shared experts, correction bias", num_hidden_layers=3),
    _family("glm4_moe_lite", "shared experts, correction bias", **SPARSE_AFTER_DENSE),
    _family("dots1", "shared experts, correction bias", num_hidden_layers=3),
    _family("ernie4_5_moe", "shared experts, correction bias", num_hidden_layers=3),
    _family("afmoe", "shared experts, correction bias", num_hidden_layers=3),
    _family("exaone_moe", "shared experts, correction bias", **SPARSE_AFTER_DENSE),
    _family("mimo_v2_flash", "correction bias", **SPARSE_AFTER_DENSE),
    _family("laguna", "shared expert", **SPARSE_AFTER_DENSE),
    _family("hy_v3", "shared experts, correction bias", **SPARSE_AFTER_DENSE),
    _family("axk1", "shared experts, correction bias", **SPARSE_AFTER_DENSE),
    _family("axk2", "shared experts, sparse attention", **SPARSE_AFTER_DENSE),
    _family(
        "mistral4",
        "shared experts",
        auto="AutoModelForImageTextToText",
        num_hidden_layers=3,
    ),
    _family(
        "gemma4_text",
        "a dense MLP beside the experts",
        enable_moe_block=True,
        top_k_experts=TOP_K,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        global_head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _family(
        "inkling_text",
        "shared experts weighted by the router",
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=6,
        rel_extent=16,
        d_rel=4,
        layer_types=["hybrid", "hybrid_sliding"],
        log_scaling_n_floor=8,
        logits_mup_width_multiplier=1.0,
        route_scale=1.0,
        mlp_layer_types=["sparse", "sparse"],
    ),
    # Other mixers than attention
    _family("qwen3_next", "gated shared expert, linear attention", **LINEAR_AND_FULL),
    _family("qwen3_5_moe_text", "gated shared expert, linear attention", **LINEAR_AND_FULL),
    _family(
        "minimax", "linear attention", intermediate_size=EXPERT, block_size=8, **LINEAR_AND_FULL
    ),
    _family(
        "kimi_linear",
        "shared experts, linear attention",
        **SPARSE_AFTER_DENSE,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    _family(
        "granitemoehybrid",
        "shared expert, Mamba",
        intermediate_size=EXPERT,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_chunk_size=8,
        **LINEAR_AND_FULL,
    ),
    _family(
        "jamba",
        "Mamba, dense layers between",
        intermediate_size=EXPERT,
        num_hidden_layers=3,
        expert_layer_period=2,
        expert_layer_offset=0,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
    ),
    _family(
        "lfm2_moe",
        "short convolutions",
        num_hidden_layers=3,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
    ),
    _family(
        "zaya",
        "top 1, a token may skip the experts",
        num_experts_per_tok=1,
        router_hidden_size=16,
    ),
    # Other experts
    _family(
        "overspill_gpt",
        "no gate, dense layers between, weights that do not sum to 1",
        intermediate_size=EXPERT,
        num_key_value_heads=None,
        sliding_window=None,
        num_hidden_layers=4,
        moe_every=2,
        norm_topk_prob=False,
        tie_word_embeddings=False,
    ),
    _family(
        "nemotron_h",
        "no gate, experts on a projection of the hidden state, Mamba",
        layers_block_type=["mamba", "moe", "attention", "moe"],
        moe_latent_size=16,
        moe_shared_expert_intermediate_size=20,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
    ),
    _family(
        "gpt_oss",
        "transposed, biases, gate and up interleaved, own gate",
        intermediate_size=EXPERT,
    ),
    _family(
        "openai_privacy_filter",
        "transposed, biases, own gate",
        auto="AutoModelForTokenClassification",
        intermediate_size=EXPERT,
    ),
    _family("aria_text", "transposed, shared experts", since="5.22", intermediate_size=EXPERT),
    _family("minimax_m3_vl_text", "own gate, shared expert", intermediate_size=EXPERT),
    _family("hy_v4", "own gate, shared experts", **SPARSE_AFTER_DENSE),
    _family(
        "deepseek_v4",
        "own gate, routing by token number, shared experts",
        mlp_layer_types=["hash_moe", "moe"],
        layer_types=["sliding_attention", "sliding_attention"],
        o_groups=2,
        o_lora_rank=8,
        hc_mult=2,
    ),
    _family("beam", "own gate, correction bias", since="5.22", **SPARSE_AFTER_DENSE),
    _family("flint", "shared expert", since="5.22", num_hidden_layers=3, mlp_only_layers=[0]),
    _family("kolibri1", "shared expert", since="5.22"),
    # The language model is a part of the model
    _nested(
        "qwen3_vl_moe",
        "nested",
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "deepstack_visual_indexes": [0],
        },
    ),
    _nested(
        "qwen3_5_moe",
        "nested, gated shared expert, linear attention",
        text=LINEAR_AND_FULL,
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
        },
    ),
    _nested(
        "muse_spark",
        "nested, a norm after each expert, experts on a projection of the hidden state",
        since="5.22",
        text={"moe_hidden_size": 16, "output_multiplier": 1.0, **SPARSE_AFTER_DENSE},
        vision_config={
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 2,
        },
        audio_config={
            "hidden_sizes": [8, 8, 8, 8],
            "depths": [1, 1, 1, 1],
            "out_hidden_size": HIDDEN,
        },
        out_hidden_size=64,
        projector_hidden_size=16,
    ),
    # Experts are modules of their own
    _family(
        "switch_transformers",
        "encoder and decoder, top 1, a module per expert, no gate",
        auto="AutoModelForSeq2SeqLM",
        d_model=HIDDEN,
        d_ff=EXPERT,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        num_sparse_encoder_layers=1,
        num_decoder_layers=2,
        num_sparse_decoder_layers=2,
        expert_capacity=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    _family(
        "nllb-moe",
        "encoder and decoder, a module per expert, biases, no gate",
        auto="AutoModelForSeq2SeqLM",
        d_model=HIDDEN,
        encoder_ffn_dim=EXPERT,
        decoder_ffn_dim=EXPERT,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        dropout=0.0,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        moe_token_dropout=0.0,
    ),
)

# Families with the layout of experts, the kinds of conversions and the mixers of another one
LIKE = {
    "olmoe": "mixtral",
    "flex_olmo": "mixtral",
    "mellum": "mixtral",
    "hunyuan_v1_moe": "qwen2_moe",
    "cohere2_moe": "qwen2_moe",
    "laguna": "qwen2_moe",
    "flint": "qwen2_moe",
    "kolibri1": "qwen2_moe",
    "minimax_m2": "deepseek_v3",
    "solar_open": "deepseek_v3",
    "deepseek_v2": "deepseek_v3",
    "glm4_moe": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "dots1": "deepseek_v3",
    "ernie4_5_moe": "deepseek_v3",
    "afmoe": "deepseek_v3",
    "exaone_moe": "deepseek_v3",
    "mimo_v2_flash": "deepseek_v3",
    "hy_v3": "deepseek_v3",
    "axk1": "deepseek_v3",
    "axk2": "deepseek_v32",
    "glm_moe_dsa": "deepseek_v32",
    "qwen3_5_moe_text": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "granitemoeshared": "granitemoe",
    "granitemoe_swa": "granitemoe",
}

# Layers of one model whose experts differ in shape, some without a token in a batch of text
UNEVEN: tuple[Family, ...] = (
    _nested(
        "ernie4_5_vl_moe",
        "nested, shared experts, other experts for images",
        text={
            "moe_intermediate_size": [EXPERT, 20],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
            **SPARSE_AFTER_DENSE,
        },
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    ),
)
