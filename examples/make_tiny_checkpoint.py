"""Makes a Mixtral small enough for any machine, to try the other examples and `overspill finetune`.

    python examples/make_tiny_checkpoint.py tiny
    python examples/make_tiny_checkpoint.py tiny-fp8 --format fp8-block

OUT is then an ordinary Hugging Face checkpoint with random weights: a config, weights, and a
tokenizer with one token per byte and a chat template. Two files of data lie beside them, text.jsonl
and chats.jsonl. With --format the weights of attention and experts are packed, as most that people
download are; mxfp4 makes a gpt-oss, of which only experts are packed.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TEXTS = (
    "Experts that do not fit spill over into host memory.",
    "A router sends every token to two experts.",
    "What the host cannot hold lies on the disk.",
    "Each expert moves, computes and learns on its own.",
    "Gradients leave the device as they are made.",
    "The next upload of an expert waits for its update, and for nothing else.",
    "An expert without tokens decays all the same.",
    "Training with offload gives the losses of training without.",
)

CHATS = (
    ("Experts per token?", "Two of eight."),
    ("Where do they live?", "Wherever they fit."),
    ("Is anything lost?", "No, nothing."),
    ("A full disk?", "It says so."),
    ("Who updates an expert?", "The CPU does."),
    ("When is it updated?", "After its gradient."),
    ("Is the GPU idle then?", "No, it goes on."),
    ("What if memory is short?", "Experts go to the disk."),
    ("And if there is more?", "They stay on the GPU."),
    ("May I stop a run?", "Yes, then resume it."),
    ("What is the result?", "A plain checkpoint."),
    ("Are losses the same?", "Yes, they are."),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny Mixtral checkpoint.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--experts", type=int, default=8, help="experts in each layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=FORMATS, help="pack the weights, default: do not")
    args = parser.parse_args()

    tokenizer = byte_tokenizer()
    torch.manual_seed(args.seed)
    make = make_gpt_oss if args.format == "mxfp4" else make_model
    make(len(tokenizer), args.experts).save_pretrained(args.out)
    if args.format:
        pack(args.out, args.format)
    tokenizer.save_pretrained(args.out)
    write_lines(args.out / "text.jsonl", [{"text": text} for text in TEXTS])
    write_lines(args.out / "chats.jsonl", [{"messages": messages(*chat)} for chat in CHATS])
    name = "gpt-oss" if args.format == "mxfp4" else "Mixtral"
    print(f"{args.out}: a {name} with 2 layers of {args.experts} experts, text.jsonl, chats.jsonl")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token: pairs of bytes of which none is ever merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=128,
    )


def make_model(vocabulary: int, experts: int) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        bos_token_id=vocabulary - 3,
        eos_token_id=vocabulary - 2,
        pad_token_id=vocabulary - 1,
    )
    return MixtralForCausalLM(config)


def make_gpt_oss(vocabulary: int, experts: int) -> GptOssForCausalLM:
    config = GptOssConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=vocabulary - 3,
        eos_token_id=vocabulary - 2,
        pad_token_id=vocabulary - 1,
    )
    return GptOssForCausalLM(config)


# Packing: every function makes the stored tensors of a weight [N, K], by the ends of their names.

E2M1 = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6))
MATRICES = r"(\.experts\.\d+\.\w+|\.self_attn\.[qkvo]_proj)\.weight$"
STACKS = r"\.experts\.\w+_proj$"


def pack(folder: Path, name: str, **changes: Any) -> None:
    """Packs the weights of a checkpoint; `changes` are other values of its quantization_config."""
    file, config_file = folder / "model.safetensors", folder / "config.json"
    config, function = FORMATS[name]
    config = {**config, **changes}
    tensors: dict[str, Tensor] = {}
    for key, weight in load_file(file).items():
        if re.search(STACKS if name == "mxfp4" else MATRICES, key):
            made = function(weight.float(), config)
            tensors |= {key.removesuffix("weight") + end: part for end, part in made.items()}
        else:
            tensors[key] = weight
    save_file({key: part.contiguous() for key, part in tensors.items()}, file, {"format": "pt"})
    text = json.loads(config_file.read_text()) | {"quantization_config": config}
    config_file.write_text(json.dumps(text, indent=2))


def largest(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The largest magnitude in each block of rows and columns."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -k % columns, 0, -n % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3)).clamp(min=1e-9)


def spread(scales: Tensor, rows: int, columns: int, weight: Tensor) -> Tensor:
    """The scale of every weight."""
    n, k = weight.shape
    return scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def e2m1(values: Tensor) -> Tensor:
    """Two codes in a byte, the first one in the low four bits."""
    codes = (values[..., None] - E2M1).abs().argmin(-1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def nibbles(codes: Tensor, dim: int) -> Tensor:
    """Eight codes of 4 bits in an int32, the first one in the lowest bits."""
    parts = [codes.unflatten(dim, (-1, 8)).select(dim + 1, at).long() << 4 * at for at in range(8)]
    words = torch.stack(parts).sum(0)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def mxfp4(stack: Tensor, config: Any) -> dict[str, Tensor]:
    """Experts [E, K, N], whose stored codes have outputs as rows."""
    weight = stack.mT.flatten(0, 1)
    exponents = largest(weight, 1, 32).log2().floor().clamp(-120) - 2
    codes = e2m1(weight / spread(exponents.exp2(), 1, 32, weight))
    blocks = codes.view(len(stack), -1, weight.shape[1] // 32, 16)
    return {"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8).view(blocks.shape[:3])}


def pack_fp8(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    scales = largest(weight, rows, columns) / 448
    return (weight / spread(scales, rows, columns, weight)).to(torch.float8_e4m3fn), scales


def fp8_block(weight: Tensor, config: Any) -> dict[str, Tensor]:
    codes, scales = pack_fp8(weight, *config["weight_block_size"])
    return {"weight": codes, "weight_scale_inv": scales}


def fp8_tensor(weight: Tensor, config: Any) -> dict[str, Tensor]:
    codes, scales = pack_fp8(weight, *weight.shape)
    return {"weight": codes, "weight_scale": scales[0, 0], "input_scale": torch.ones(())}


def fp8_channel(weight: Tensor, config: Any) -> dict[str, Tensor]:
    codes, scales = pack_fp8(weight, 1, weight.shape[1])
    return {"weight": codes, "weight_scale": scales.bfloat16()}


def mxfp8(weight: Tensor, config: Any) -> dict[str, Tensor]:
    exponents = largest(weight, 1, 32).log2().floor().clamp(-110) - 8
    codes = (weight / spread(exponents.exp2(), 1, 32, weight)).clamp(-448, 448)
    scales = (exponents + 127).to(torch.uint8)
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def pack_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    factor = weight.abs().max() / (6 * 448)
    scales = (largest(weight, 1, 16) / 6 / factor).to(torch.float8_e4m3fn)
    each = spread(scales.float() * factor, 1, 16, weight)
    return e2m1(weight / each.clamp(min=1e-20)), scales, factor


def nvfp4(weight: Tensor, config: Any) -> dict[str, Tensor]:
    codes, scales, factor = pack_nvfp4(weight)
    ones = torch.ones(())
    return {"weight": codes, "weight_scale": scales, "weight_scale_2": factor, "input_scale": ones}


def nvfp4_compressed(weight: Tensor, config: Any) -> dict[str, Tensor]:
    codes, scales, factor = pack_nvfp4(weight)
    return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": 1 / factor[None]}


def round_to_integers(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 to 15, scales and zero points."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (grouped / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, 15).flatten(1).int(), scales, zeros.int()


def int4(weight: Tensor, config: Any) -> dict[str, Tensor]:
    weights = config["config_groups"]["group_0"]["weights"]
    group = weights.get("group_size") or weight.shape[1]
    parts = {"weight_shape": torch.tensor(weight.shape)}
    if weights["symmetric"]:
        scales = (largest(weight, 1, group) / 7).bfloat16()
        codes = (weight / spread(scales.float(), 1, group, weight)).round().clamp(-8, 7).int() + 8
    else:
        codes, scales, zeros = round_to_integers(weight, group)
        parts["weight_zero_point"] = nibbles(zeros, 0)
    return {**parts, "weight_packed": nibbles(codes, 1), "weight_scale": scales}


def gptq(weight: Tensor, config: Any) -> dict[str, Tensor]:
    codes, scales, zeros = round_to_integers(weight, config["group_size"])
    stored = nibbles(zeros.T, 1)
    if config["checkpoint_format"] == "gptq":  # the first format stores zero points less one
        stored -= 0x11111111
    groups = torch.arange(weight.shape[1], dtype=torch.int32) // config["group_size"]
    return {"qweight": nibbles(codes.T, 0), "qzeros": stored, "scales": scales.T, "g_idx": groups}


def awq(weight: Tensor, config: Any) -> dict[str, Tensor]:
    codes, scales, zeros = round_to_integers(weight, config["group_size"])

    def in_order(rows: Tensor) -> Tensor:
        return nibbles(rows.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 1)

    return {"qweight": in_order(codes.T), "qzeros": in_order(zeros.T), "scales": scales.T}


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def integers(**weights: Any) -> dict[str, Any]:
    return compressed("pack-quantized", type="int", num_bits=4, **weights)


Function = Callable[[Tensor, Any], dict[str, Tensor]]
FORMATS: dict[str, tuple[dict[str, Any], Function]] = {
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
    "mxfp8": ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, mxfp8),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8_block,
    ),
    "fp8-channel": (
        compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
        fp8_channel,
    ),
    "fp8-tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, nvfp4),
    "nvfp4-compressed": (
        compressed(
            "nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16
        ),
        nvfp4_compressed,
    ),
    "int4": (integers(strategy="group", group_size=32, symmetric=True), int4),
    "int4-asymmetric": (integers(strategy="group", group_size=32, symmetric=False), int4),
    "int4-channel": (integers(strategy="channel", symmetric=True), int4),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
        | {"desc_act": False, "sym": False},
        gptq,
    ),
}


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_lines(file: Path, lines: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
