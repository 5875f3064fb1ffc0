"""Layouts of packed weights that few checkpoints have, element by element."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from overspill.models.huggingface.folder import CheckpointFolder
from tests.models.huggingface.packed.cases import MAKE
from tests.models.huggingface.packed.naive import e2m1, e4m3, e8m0, nibble

N, K = 8, 64


def draw(seed: int, shape: tuple[int, ...], high: int = 256) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=random, dtype=torch.uint8)


CODES = draw(0, (N, K), 120)  # no NaN in e4m3
HALVES = draw(1, (N, K // 2))
POWERS = draw(2, (N, K // 32), 255)
STACK = draw(3, (3, N, K), 120)
FLOATS = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(4))
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Layout:
    """Stored tensors by the ends of their names, and the value of an element of the weight."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    value: Callable[..., float]
    shape: tuple[int, ...] = (N, K)


def fp4(n: int, k: int) -> float:
    return e2m1(nibble(int(HALVES[n, k // 2]), k % 2)) * e8m0(int(POWERS[n, k // 32]))


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return MAKE["compressed"](layout, **weights)


WORDS = CODES.view(torch.int32)
CHANNEL = FLOATS.flatten()[:N, None].bfloat16()
LAYOUTS = {
    "DeepSeek-V4": Layout(
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        {"weight": HALVES.view(torch.int8), "scale": POWERS.view(torch.float8_e8m0fnu)},
        fp4,
    ),
    "MXFP4 of compressed-tensors": Layout(
        compressed("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32),
        {"weight_packed": HALVES, "weight_scale": POWERS},
        fp4,
    ),
    "MXFP8 of ModelOpt": Layout(
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        {"weight": CODES.view(FP8), "weight_scale": POWERS},
        lambda n, k: e4m3(int(CODES[n, k])) * e8m0(int(POWERS[n, k // 32])),
    ),
    "FP8 blocks of ModelOpt": Layout(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        {"weight": CODES.view(FP8), "weight_scale": FLOATS[:1, :1, :1, None]},
        lambda n, k: e4m3(int(CODES[n, k])) * float(FLOATS[0, 0, 0]),
    ),
    "FP8 blocks of compressed-tensors": Layout(
        compressed(
            "float-quantized", type="float", num_bits=8, strategy="block", block_structure=[3, 20]
        ),
        {"weight": CODES.view(FP8), "weight_scale": FLOATS[0, :3]},
        lambda n, k: e4m3(int(CODES[n, k])) * float(FLOATS[0, n // 3, k // 20]),
    ),
    "FP8 without blocks": Layout(
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        {
            "weight": CODES.view(FP8),
            "weight_scale_inv": FLOATS[0, 0, 0],
            "activation_scale": torch.ones(()),
        },
        lambda n, k: e4m3(int(CODES[n, k])) * float(FLOATS[0, 0, 0]),
    ),
    "stacks of FP8 blocks": Layout(
        {"quant_method": "fp8", "weight_block_size": [2, 16]},
        {"": STACK.view(FP8), "_scale_inv": FLOATS},
        lambda e, n, k: e4m3(int(STACK[e, n, k])) * float(FLOATS[e, n // 2, k // 16]),
        (3, N, K),
    ),
    "int8": Layout(
        compressed("int-quantized", type="int", num_bits=8, strategy="channel"),
        {"weight": CODES.view(torch.int8), "weight_scale": CHANNEL},
        lambda n, k: int(CODES.view(torch.int8)[n, k]) * float(CHANNEL[n, 0]),
    ),
    "int8 in int32": Layout(
        compressed("pack-quantized", type="int", num_bits=8, strategy="channel"),
        {"weight_packed": WORDS, "weight_scale": CHANNEL, "weight_shape": torch.tensor([N, K])},
        lambda n, k: (int(CODES[n, k]) - 128) * float(CHANNEL[n, 0]),
    ),
    "GPTQ of 8 bits, second format": Layout(
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        {"qweight": WORDS.T, "qzeros": CODES[:1, :N].view(torch.int32), "scales": CHANNEL.half().T},
        lambda n, k: (int(CODES[n, k]) - int(CODES[0, n])) * float(CHANNEL.half()[n, 0]),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_code_times_scale(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    path = "experts.gate_up_proj" if "" in layout.tensors else "experts.0.w1."
    tensors = {path + end: part.clone().contiguous() for end, part in layout.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    text = {"model_type": "mixtral", "quantization_config": layout.config}
    (tmp_path / "config.json").write_text(json.dumps(text))
    places = torch.cartesian_prod(*(torch.arange(size) for size in layout.shape)).tolist()
    exact = [layout.value(*place) for place in places]
    expected = torch.tensor(exact, dtype=torch.float64).float().view(layout.shape)
    with CheckpointFolder(tmp_path) as checkpoint:
        ((key, spec),) = checkpoint.specs.items()
        plain = path + "weight" if path.endswith(".") else path
        assert (key, spec.shape) == (plain, layout.shape)
        assert torch.equal(checkpoint.read_whole(key), expected)
        last = torch.empty(N, K)  # one matrix of a stack
        checkpoint.read(key, expected.numel() - N * K, last)
        assert torch.equal(last, expected.view(-1, N, K)[-1])
        transposed = torch.empty(K, N).T
        checkpoint.read(key, 0, transposed)
        assert torch.equal(transposed, expected.view(-1, N, K)[0])
