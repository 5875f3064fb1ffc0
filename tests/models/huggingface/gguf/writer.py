"""GGUF files of tiny models, written as llama.cpp's converter does, with its own package."""

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

Kind = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
}
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_XS": (0,), "IQ2_XS": (0,), "IQ3_S": (0,),
}  # fmt: skip
"""Positions of the float16 factors in a block."""
_FACTOR = {"Q6_K": 2e-4, "Q4_K": 4e-4, "Q5_K": 2e-4, "Q8_0": 2e-3, "IQ4_NL": 2e-3, "Q4_0": 3e-2}
Choose = Callable[[str, tuple[int, ...]], str]
"""The type of a tensor, by its name and shape."""


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Bytes of any codes, with finite factors."""
    rng = np.random.default_rng([seed, *shape])
    weights, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // weights, nbytes), dtype=np.uint8)
    size = _FACTOR.get(kind, 3e-3)
    for at in _HALVES.get(kind, ()):
        factors = (size * rng.uniform(0.5, 1, blocks.shape[:-1])).astype(np.float16)
        blocks[..., at : at + 2] = factors[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(120, 124, blocks.shape[:-1])
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    model: Any, path: Path, choose: Choose, fused: bool = False, old: bool = False, **split: int
) -> None:
    """Writes a model, and changes its weights to the values that are stored. With `fused`, gate and
    up of experts are one tensor; `old` files of Mixtral have one for each expert."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], **split)
    add_metadata(writer, config)
    with torch.no_grad():
        for name, tensor in list(model.state_dict().items()):
            if config.tie_word_embeddings and name == "lm_head.weight":
                continue
            for source, view in _sources(config, name, tensor, fused):
                base, _, end = source.rpartition(".")
                known = base.replace("gate_up_proj", "up_proj")
                stored = names.get_name(known)
                assert stored is not None, source
                if known != base:
                    stored = stored.replace("ffn_up", "ffn_gate_up")
                parts = [(f"{stored}.{end}", view)]
                if old and "_exps" in stored:
                    base = stored.removesuffix("_exps")
                    parts = [(f"{base}.{number}.{end}", part) for number, part in enumerate(view)]
                for full, part in parts:
                    _add(writer, full, part, choose(f"{stored}.{end}", tuple(part.shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, view: Any, kind: str) -> None:
    """Adds a tensor of a type, and changes it to the values of the type."""
    plain = {"F32": torch.float32, "F16": torch.half, "BF16": torch.bfloat16}.get(kind)
    if plain is not None:
        rounded = view.to(plain).contiguous()
        data = (rounded.view(torch.uint8) if kind == "BF16" else rounded).numpy()
        view.copy_(rounded)
    else:
        data = random_blocks(kind, tuple(view.shape), zlib.crc32(name.encode()))
        view.copy_(torch.from_numpy(gguf.dequantize(data, Kind[kind])))
    writer.add_tensor(name, data, raw_dtype=None if kind in ("F32", "F16") else Kind[kind])


def _sources(config: Any, name: str, tensor: Tensor, fused: bool) -> list[tuple[str, Tensor]]:
    """Return names and views of the tensors that the converter stores for a tensor of the model."""
    if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
        end = "bias" if name.endswith("_bias") else "weight"
        base = name.removesuffix("_bias").removesuffix("gate_up_proj")
        if config.model_type == "gpt_oss":
            rows = tensor if end == "bias" else tensor.mT
            gate, up = rows[:, ::2], rows[:, 1::2]
        else:
            gate, up = tensor.chunk(2, 1)
        if fused:
            return [(f"{base}gate_up_proj.{end}", tensor)]
        return [(f"{base}gate_proj.{end}", gate), (f"{base}up_proj.{end}", up)]
    if name.endswith(("experts.down_proj", "experts.down_proj_bias")):
        end = "bias" if name.endswith("_bias") else "weight"
        turned = tensor.mT if config.model_type == "gpt_oss" and end == "weight" else tensor
        return [(f"{name.removesuffix('_bias')}.{end}", turned)]
    if name.endswith("sinks"):
        return [(f"{name}.weight", tensor)]
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("correction_bias", "correction.bias"), tensor)]
    if name.endswith("shared_expert_gate.weight"):
        return [(name, tensor[0])]
    if config.model_type == "mixtral" and (turn := re.search(r"\.([qk])_proj\.", name)):
        heads = config.num_attention_heads if turn[1] == "q" else config.num_key_value_heads
        halves = tensor.view(heads, 2, -1, tensor.shape[1])
        return [(name, _Permuted(halves.transpose(1, 2)))]
    if name.endswith("kv_b_proj.weight"):
        each = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
        keys, values = each.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        return [
            (name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)),
            (name.replace("kv_b_proj", "v_b_proj"), values),
        ]
    return [(name, tensor)]


class _Permuted:
    """A view of rows in another order."""

    def __init__(self, view: Tensor) -> None:
        self._view = view
        self.shape = (view.shape[:-1].numel(), view.shape[-1])

    def copy_(self, values: Tensor) -> None:
        self._view.copy_(values.view(self._view.shape))

    def to(self, dtype: torch.dtype) -> Tensor:
        return self._view.reshape(self.shape).to(dtype)


def add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    """Return the metadata that `set_gguf_parameters` of the converter writes for the family."""
    rope, family = config.rope_parameters, config.model_type
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_expert_used_count(config.num_experts_per_tok)
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    writer.add_expert_count(next(getattr(config, n) for n in experts if hasattr(config, n)))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family.startswith("deepseek"):
        writer.add_head_count_kv(1)
        if config.q_lora_rank:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        if config.n_group:
            writer.add_expert_group_count(config.n_group)
            writer.add_expert_group_used_count(config.topk_group)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1)))
        if getattr(config, "head_dim", None):
            writer.add_key_length(head)
            writer.add_value_length(head)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family in ("gpt_oss", "minimax_m2"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if family == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if hasattr(config, "first_k_dense_replace"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if family in ("glm4_moe", "deepseek_v3"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for name in ("bos", "eos", "pad"):
        token = getattr(config, f"{name}_token_id")
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(token)
