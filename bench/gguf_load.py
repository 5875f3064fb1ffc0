"""Loads a GGUF file with random weights of Qwen3-30B-A3B's shape, unpacked and packed, and decodes.

PYTHONPATH=src python3 bench/gguf_load.py --layers 8 --types Q4_K Q8_0 MXFP4
PYTHONPATH=src python3 bench/gguf_load.py --smoke       # tiny, on the CPU
"""

import argparse
import math
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import overspill
from overspill.models.huggingface.gguf.header import TYPES

NUMBERS = {name: number for number, (name, *_) in TYPES.items()}
FACTORS = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
"""Where the float16 factors of a block are; at its beginning, if it is not said."""
WHOLE, FLOAT, TEXT = 4, 6, 8


def data(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    """Ones, or blocks of random codes with small factors."""
    if kind == "F32":
        return np.ones(shape, np.float32).tobytes()
    _, weights, nbytes = TYPES[NUMBERS[kind]]
    blocks = np.frombuffer(rng.bytes(math.prod(shape) // weights * nbytes), np.uint8).copy()
    blocks = blocks.reshape(-1, nbytes)
    if kind == "MXFP4":
        blocks[:, 0] = 118
    else:
        for at in FACTORS.get(kind, (0,)):
            blocks[:, at : at + 2] = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    return blocks.tobytes()


def write(path: Path, layers: int, kind: str, smoke: bool) -> int:
    """Writes the file; half of the layers of Q4_K have Q6_K in `ffn_down_exps`. Returns the number
    of weights."""
    d, hidden, experts, heads, head, vocab = 2048, 768, 128, 32, 128, 32768
    if smoke:
        d, hidden, experts, heads, head, vocab = 256, 256, 8, 4, 64, 512
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd": ((vocab, d), "Q8_0"), "output": ((vocab, d), "Q8_0"),
        "output_norm": ((d,), "F32"),
    }  # fmt: skip
    for layer in range(layers):
        down = "Q6_K" if kind == "Q4_K" and layer % 2 else kind
        each = {
            "attn_norm": ((d,), "F32"), "ffn_norm": ((d,), "F32"),
            "attn_q_norm": ((head,), "F32"), "attn_k_norm": ((head,), "F32"),
            "attn_q": ((heads * head, d), "Q8_0"), "attn_k": ((4 * head, d), "Q8_0"),
            "attn_v": ((4 * head, d), "Q8_0"), "attn_output": ((d, heads * head), "Q8_0"),
            "ffn_gate_inp": ((experts, d), "Q8_0"),
            "ffn_gate_exps": ((experts, hidden, d), kind),
            "ffn_up_exps": ((experts, hidden, d), kind),
            "ffn_down_exps": ((experts, d, hidden), down),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": found for name, found in each.items()}
    numbers = {
        "context_length": 4096, "embedding_length": d, "block_count": layers,
        "feed_forward_length": 3 * hidden, "expert_count": experts, "expert_used_count": 8,
        "expert_feed_forward_length": hidden, "attention.head_count": heads,
        "attention.head_count_kv": 4, "attention.key_length": head,
    }  # fmt: skip
    floats = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    header = struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), 1 + len(numbers) + len(floats))
    header += text("general.architecture") + struct.pack("<I", TEXT) + text("qwen3moe")
    for name, number in numbers.items():
        header += text(f"qwen3moe.{name}") + struct.pack("<II", WHOLE, number)
    for name, value in floats.items():
        header += text(f"qwen3moe.{name}") + struct.pack("<If", FLOAT, value)
    at = 0
    for name, (shape, kind_of) in shapes.items():
        _, weights, nbytes = TYPES[NUMBERS[kind_of]]
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += text(f"{name}.weight") + sizes + struct.pack("<IQ", NUMBERS[kind_of], at)
        at += -(-math.prod(shape) // weights * nbytes // 32) * 32
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(header.ljust(-(-len(header) // 32) * 32, b"\0"))
        for shape, kind_of in shapes.values():
            part = data(kind_of, shape, rng)
            file.write(part.ljust(-(-len(part) // 32) * 32, b"\0"))
    return sum(math.prod(shape) for shape, _ in shapes.values())


def decode(llm: overspill.LLM, requests: int, tokens: int) -> float:
    """Tokens a second."""
    asked = overspill.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = [[1 + request, 2, 3] for request in range(requests)]
    llm.generate(prompts, asked)
    begin = time.perf_counter()
    llm.generate(prompts, asked)
    return requests * tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--types", nargs="+", default=["Q4_K", "Q8_0", "MXFP4"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--folder", type=Path, default=None, help="where files are written")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    layers, tokens = (2, 4) if args.smoke else (args.layers, args.tokens)
    device = "cpu" if args.smoke or not torch.cuda.is_available() else "cuda"
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for kind in args.types:
            path = Path(folder) / f"{kind}.gguf"
            weights = write(path, layers, kind, args.smoke)
            for packed in (False, True):
                begin = time.perf_counter()
                with overspill.LLM(path, device=device, packed=packed, context=512) as llm:
                    seconds = time.perf_counter() - begin
                    record = llm.model.overspill.layout.weight_bytes
                    speeds = [decode(llm, requests, tokens) for requests in (1, 16)]
                rows.append((kind, packed, path.stat().st_size, weights, seconds, record, speeds))
            path.unlink()
    print("type    packed  file GB  load s  GB/s  Gweights/s  record MB  tok/s at 1 and 16")
    for kind, packed, size, weights, seconds, record, (one, many) in rows:
        print(
            f"{kind:7} {packed!s:6} {size / 1e9:8.2f} {seconds:7.1f} {size / seconds / 1e9:5.2f} "
            f"{weights / seconds / 1e9:11.2f} {record / 1e6:10.2f} {one:11.1f} {many:7.1f}"
        )


if __name__ == "__main__":
    main()
