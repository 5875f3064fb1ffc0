"""Makes a Mixtral small enough for any machine, to try the other examples and `overspill finetune`.

    python examples/make_tiny_checkpoint.py tiny
    python examples/make_tiny_checkpoint.py tiny-fp8 --format fp8-block

OUT is then an ordinary Hugging Face checkpoint with random weights: a config, weights, and a
tokenizer with one token per byte and a chat template. Two files of data lie beside them, text.jsonl
and chats.jsonl. With --format the weights of attention and experts are packed, as most that people
download are; mxfp4 makes a gpt-oss, of which only experts are packed. The formats gguf-… make one
file with everything, model.gguf, as llama.cpp does; they need `pip install gguf`.
"""

import argparse
import importlib.util
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
    formats = [*FORMATS, *GGUF_TYPES]
    parser.add_argument("--format", choices=formats, help="pack the weights, default: do not")
    args = parser.parse_args()
    if args.format in GGUF_TYPES and importlib.util.find_spec("gguf") is None:
        parser.error(f"--format {args.format} needs the package of llama.cpp: pip install gguf")

    tokenizer = byte_tokenizer()
    torch.manual_seed(args.seed)
    gpt_oss = args.format in ("mxfp4", "gguf-mxfp4")
    width = 256 if GGUF_TYPES.get(args.format) == "Q4_K" else 32  # of a block of weights
    model = (make_gpt_oss if gpt_oss else make_model)(len(tokenizer), args.experts, width)
    if args.format in GGUF_TYPES:
        args.out.mkdir(parents=True, exist_ok=True)
        types = GGUF_TYPES[args.format], LARGER if args.format == "gguf-mixed" else {}
        write_gguf(model, tokenizer, *types, args.out / "model.gguf")
    else:
        model.save_pretrained(args.out)
        if args.format:
            pack(args.out, args.format)
        tokenizer.save_pretrained(args.out)
    write_lines(args.out / "text.jsonl", [{"text": text} for text in TEXTS])
    write_lines(args.out / "chats.jsonl", [{"messages": messages(*chat)} for chat in CHATS])
    name = "gpt-oss" if gpt_oss else "Mixtral"
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


def make_model(vocabulary: int, experts: int, width: int = 32) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
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


def make_gpt_oss(vocabulary: int, experts: int, width: int = 32) -> GptOssForCausalLM:
    config = GptOssConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
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


def mxfp4_compressed(weight: Tensor, config: Any) -> dict[str, Tensor]:
    parts = mxfp4(weight.T[None], config)
    return {
        "weight_packed": parts["_blocks"].reshape(len(weight), -1),
        "weight_scale": parts["_scales"][0],
    }


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


def int8(weight: Tensor, config: Any) -> dict[str, Tensor]:
    scales = (largest(weight, 1, weight.shape[1]) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}


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
    "mxfp4-compressed": (
        compressed(
            "mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32
        ),
        mxfp4_compressed,
    ),
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
    "int8": (
        compressed("int-quantized", type="int", num_bits=8, strategy="channel", symmetric=True),
        int8,
    ),
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


# GGUF: one file with config, tokenizer and weights.

GGUF_TYPES = {
    "gguf-q8_0": "Q8_0", "gguf-q4_0": "Q4_0", "gguf-q4_k": "Q4_K", "gguf-mixed": "Q4_K",
    "gguf-mxfp4": "MXFP4",
}  # fmt: skip
LARGER = {"blk.0.ffn_down_exps.weight": "Q8_0"}
"""Tensors of gguf-mixed with more bits, as some layers have in files that people download."""


def write_gguf(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    usual: str,
    others: dict[str, str],
    file: Path,
) -> None:
    """Packs weights of at least a block, but routers, as `usual` or as `others` say by their
    names; the rest stays in float32."""
    import gguf

    config = model.config
    gpt_oss = config.model_type == "gpt_oss"
    architecture = gguf.MODEL_ARCH.GPT_OSS if gpt_oss else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    add_config(writer, config)
    add_tokenizer(writer, tokenizer)
    for key, weight in model.state_dict().items():
        for name, tensor in gguf_tensors(config, key, weight):
            base, _, end = name.rpartition(".")
            stored = f"{names.get_name(base)}.{end}"
            kind = others.get(stored, usual)
            packed = end == "weight" and tensor.dim() > 1 and "inp" not in stored
            array = tensor.contiguous().float().numpy()
            if packed and kind == "Q4_K":
                blocks = q4_k(tensor.reshape(-1, tensor.shape[-1])).view(*tensor.shape[:-1], -1)
                writer.add_tensor(stored, blocks.numpy(), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
            elif packed:
                quantization = gguf.GGMLQuantizationType[kind]
                writer.add_tensor(
                    stored, gguf.quantize(array, quantization), raw_dtype=quantization
                )
            else:
                writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_config(writer: Any, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "gpt_oss":
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)


def add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)


def gguf_tensors(config: Any, key: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors that llama.cpp stores of one of the model's: gate and up by themselves, experts
    not transposed, and rows of queries and keys of Mixtral in its own order."""
    gpt_oss = config.model_type == "gpt_oss"
    end = "bias" if key.endswith("_bias") else "weight"
    base = key.removesuffix("_bias")
    if base.endswith("experts.gate_up_proj"):
        rows = weight.mT if gpt_oss and end == "weight" else weight
        gate, up = (rows[:, ::2], rows[:, 1::2]) if gpt_oss else rows.chunk(2, 1)
        prefix = base.removesuffix("gate_up_proj")
        return [(f"{prefix}gate_proj.{end}", gate), (f"{prefix}up_proj.{end}", up)]
    if base.endswith("experts.down_proj"):
        return [(f"{base}.{end}", weight.mT if gpt_oss and end == "weight" else weight)]
    if key.endswith("sinks"):
        return [(f"{key}.weight", weight)]
    if not gpt_oss and key.endswith(("q_proj.weight", "k_proj.weight")):
        query = key.endswith("q_proj.weight")
        heads = config.num_attention_heads if query else config.num_key_value_heads
        return [(key, weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape))]
    return [(key, weight)]


def q4_k(weight: Tensor) -> Tensor:
    """Blocks of 256 weights: code x scale - minimum, where scales and minimums of 32 weights are
    themselves codes of six bits."""
    groups = weight.unflatten(1, (-1, 8, 32))
    low, high = groups.amin(3).clamp(max=0), groups.amax(3).clamp(min=0)
    scales, minimums = (high - low) / 15, -low
    factors = torch.stack((scales.amax(2), minimums.amax(2)), 2).clamp(min=1e-6) / 63
    factors = factors.half()
    of_scales, of_minimums = factors.float().unbind(2)
    scale_codes = (scales / of_scales[..., None]).round().clamp(0, 63)
    minimum_codes = (minimums / of_minimums[..., None]).round().clamp(0, 63)
    spread = (scale_codes * of_scales[..., None])[..., None].clamp(min=1e-20)
    shifted = groups + (minimum_codes * of_minimums[..., None])[..., None]
    codes = (shifted / spread).round().clamp(0, 15).to(torch.uint8)
    s, m = scale_codes.to(torch.uint8), minimum_codes.to(torch.uint8)
    first = s[..., :4] | s[..., 4:] >> 4 << 6
    second = m[..., :4] | m[..., 4:] >> 4 << 6
    third = s[..., 4:] & 15 | (m[..., 4:] & 15) << 4
    nibbles = codes[..., ::2, :] | codes[..., 1::2, :] << 4
    parts = factors.view(torch.uint8), first, second, third, nibbles.flatten(2)
    return torch.cat(parts, 2).flatten(1)


def messages(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_lines(file: Path, lines: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
