"""The shape of gpt-oss-120b, and a checkpoint of it with random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from packed_models import repeated_values
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig

from overspill.models.huggingface.load import random_dense

LAYER_GB = 1.76
"""GB of a layer: packed experts, and attention."""
DENSE_GB = 2.3
"""GB of all other weights."""


def gpt_oss(layers: int = 36, smoke: bool = False) -> Any:
    if not smoke:
        return GptOssConfig(num_hidden_layers=layers)
    return GptOssConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip


def write_checkpoint(folder: Path, config: Any) -> None:
    """Write a checkpoint in the published form of gpt-oss: experts in MXFP4, with random codes. One
    shard has all dense weights, and each other one the experts of a layer."""
    with repeated_values():
        made, model = random_dense(config, torch.bfloat16, False)
    folder.mkdir(parents=True)
    config.architectures, config.dtype = [made.plain.__name__], torch.bfloat16
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.save_pretrained(folder)
    dense, shard = model.state_dict(), "model-dense.safetensors"
    save_file(dense, folder / shard, {"format": "pt"})
    places, experts = dict.fromkeys(dense, shard), _packed_experts(config)
    for layer in range(config.num_hidden_layers):
        shard = f"model-experts-{layer:02}.safetensors"
        named = {f"model.layers.{layer}.mlp.experts.{name}": t for name, t in experts.items()}
        save_file(named, folder / shard, {"format": "pt"})
        places |= dict.fromkeys(named, shard)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _packed_experts(config: Any) -> dict[str, Tensor]:
    """The tensors of a layer."""
    n, d, h = config.num_local_experts, config.hidden_size, config.intermediate_size
    found: dict[str, Tensor] = {}
    for name, rows, columns in (("gate_up_proj", 2 * h, d), ("down_proj", d, h)):
        codes = torch.empty(n * rows * columns // 16, dtype=torch.int64).random_()
        found[f"{name}_blocks"] = codes.view(torch.uint8).view(n, rows, columns // 32, 16)
        found[f"{name}_scales"] = torch.full((n, rows, columns // 32), 120, dtype=torch.uint8)
        found[f"{name}_bias"] = torch.zeros(n, rows, dtype=torch.bfloat16)
    return found
