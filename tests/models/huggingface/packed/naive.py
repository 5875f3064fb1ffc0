"""Plain weights of packed checkpoints, one element after another, in Python's own numbers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def e2m1(code: int) -> float:
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if code & 8 else size


def e4m3(code: int) -> float:
    if code & 127 == 127:
        return math.nan
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def nibble(word: int, place: int) -> int:
    return (word >> 4 * place) & 15


def product(codes: list[list[float]], scale: Callable[[int, int], float]) -> Tensor:
    """The matrix of codes times scales; Python's floats hold each product exactly."""
    rows = [[code * scale(n, k) for k, code in enumerate(row)] for n, row in enumerate(codes)]
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.array(rows, dtype=np.float64).astype(np.float32))


def bytes_of(tensor: Tensor) -> Any:
    return tensor.view(torch.uint8).tolist()


def dequantized(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, packed ones as float32."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = load_file(folder / "model.safetensors")
    plain: dict[str, Tensor] = {}
    while stored:
        name = next(iter(stored))
        base, _, end = name.rpartition(".")
        parts = [n.rpartition(".") for n in stored]
        mine = {last: stored[f"{path}.{last}"] for path, _, last in parts if path == base}
        if f"{end.removesuffix('_scales').removesuffix('_blocks')}_blocks" in mine:
            end = end.removesuffix("_scales").removesuffix("_blocks")
            blocks, scales = stored.pop(f"{base}.{end}_blocks"), stored.pop(f"{base}.{end}_scales")
            each = [_mxfp4(*pair).T for pair in zip(blocks, scales, strict=True)]
            plain[f"{base}.{end}"] = torch.stack(each).contiguous()
        elif any(last in ("weight_scale", "weight_scale_inv", "scales") for last in mine):
            plain[f"{base}.weight"] = _matrix(mine, config)
            for each in mine:
                del stored[f"{base}.{each}"]
        else:
            plain[name] = stored.pop(name)
    return plain


def _mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    codes = [
        [e2m1(half) for group in row for b in group for half in (b & 15, b >> 4)]
        for row in blocks.tolist()
    ]
    factors = scales.tolist()
    return product(codes, lambda n, k: e8m0(factors[n][k // 32]))


def _matrix(parts: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """One weight of a checkpoint of `config`."""
    if "qweight" in parts:
        return _gptq(parts, config) if config["quant_method"] == "gptq" else _awq(parts, config)
    if "weight_shape" in parts:
        return _integers(parts)
    if parts["weight" if "weight" in parts else "weight_packed"].dtype == torch.uint8:
        return _nvfp4(parts)
    codes = [[e4m3(code) for code in row] for row in bytes_of(parts["weight"])]
    scales = parts.get("weight_scale_inv", parts.get("weight_scale"))
    assert scales is not None
    if scales.dtype == torch.uint8:
        powers = scales.tolist()
        return product(codes, lambda n, k: e8m0(powers[n][k // 32]))
    if scales.numel() == 1:
        return product(codes, lambda n, k: float(scales))
    each = scales.double().tolist()
    if scales.shape == (len(codes), 1):
        return product(codes, lambda n, k: each[n][0])
    rows, columns = config["weight_block_size"]
    return product(codes, lambda n, k: each[n // rows][k // columns])


def _nvfp4(parts: dict[str, Tensor]) -> Tensor:
    packed = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    codes = [[e2m1(half) for b in row for half in (b & 15, b >> 4)] for row in packed.tolist()]
    scales = [[np.float32(e4m3(code)) for code in row] for row in bytes_of(parts["weight_scale"])]
    if "weight_scale_2" in parts:
        factor = np.float32(parts["weight_scale_2"].item())
        return product(codes, lambda n, k: float(scales[n][k // 16] * factor))
    divisor = np.float32(parts["weight_global_scale"].item())
    return product(codes, lambda n, k: float(scales[n][k // 16] / divisor))


def _integers(parts: dict[str, Tensor]) -> Tensor:
    rows, columns = parts["weight_shape"].tolist()
    words, scales = parts["weight_packed"].tolist(), parts["weight_scale"].double().tolist()
    group = columns // len(scales[0])
    zeros = parts["weight_zero_point"].tolist() if "weight_zero_point" in parts else None

    def zero(n: int, k: int) -> int:
        return 8 if zeros is None else nibble(zeros[n // 8][k // group], n % 8)

    codes = [
        [float(nibble(words[n][k // 8], k % 8) - zero(n, k)) for k in range(columns)]
        for n in range(rows)
    ]
    return product(codes, lambda n, k: scales[n][k // group])


def _gptq(parts: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    words, zeros = parts["qweight"].tolist(), parts["qzeros"].tolist()
    scales, groups = parts["scales"].double().tolist(), parts["g_idx"].tolist()
    more = int(config["checkpoint_format"] == "gptq")
    codes = [
        [
            float(
                nibble(words[k // 8][n], k % 8) - (nibble(zeros[groups[k]][n // 8], n % 8) + more)
            )
            for k in range(len(groups))
        ]
        for n in range(len(words[0]))
    ]
    return product(codes, lambda n, k: scales[groups[k]][n])


def _awq(parts: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    words, zeros = parts["qweight"].tolist(), parts["qzeros"].tolist()
    scales, group = parts["scales"].double().tolist(), config["group_size"]

    def code(row: list[int], n: int) -> int:
        return nibble(row[n // 8], AWQ_COLUMNS.index(n % 8))

    codes = [
        [float(code(words[k], n) - code(zeros[k // group], n)) for k in range(len(words))]
        for n in range(8 * len(words[0]))
    ]
    return product(codes, lambda n, k: scales[k // group][n])
