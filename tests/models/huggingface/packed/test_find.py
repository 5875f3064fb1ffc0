"""Packed checkpoints that cannot be read are refused by name, before memory is taken."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from overspill.core.errors import CheckpointError, ConfigError, OverspillError
from overspill.models.huggingface.checks import check_checkpoint
from overspill.models.huggingface.folder import CheckpointFolder
from tests.models.huggingface.families import make_model
from tests.models.huggingface.packed.cases import MAKE
from tests.models.huggingface.test_exactness import BY_NAME

Tensors = dict[str, Tensor]
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    make_model(BY_NAME["deepseek_v3"]).save_pretrained(folder)
    return folder


def packed(plain: Path, folder: Path, name: str, change: Callable[[Tensors, Any], object]) -> Path:
    """The attention of one layer, packed and then changed."""
    shutil.copytree(plain, folder)
    save_file({f"{Q}.weight": torch.randn(32, 64)}, folder / "model.safetensors")
    MAKE["pack"](folder, name)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def put(name: str, value: Tensor) -> Callable[[Tensors, Any], object]:
    return lambda tensors, config: tensors.update({f"{Q}.{name}": value})


def drop(name: str) -> Callable[[Tensors, Any], object]:
    return lambda tensors, config: tensors.pop(f"{Q}.{name}")


def set_weights(**fields: Any) -> Callable[[Tensors, Any], object]:
    return lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(fields)


def say(**fields: Any) -> Callable[[Tensors, Any], object]:
    return lambda tensors, config: config.update(fields)


# format, change, error
TENSORS: list[tuple[str, Any, str]] = [
    ("fp8-block", drop("weight_scale_inv"), "is float8_e4m3fn, .* method fp8 for it"),
    ("fp8-block", put("weight_scale_inv", torch.ones(2, 1)), r"shape \[2, 1\], config.* \[1, 1\]"),
    ("fp8-block", say(weight_block_size=[16, 16]), r"shape \[1, 1\], config\.json says \[2, 4\]"),
    ("fp8-block", put("weight", torch.ones(32, 64)), "weight_scale_inv belongs to no"),
    ("fp8-block", put("weight_scale_inv", torch.ones(1, 1).int()), "weight_scale_inv is int32"),
    (
        "fp8-block",
        lambda tensors, _: tensors.clear(),
        r"are quantized \(fp8\), but none is; remove",
    ),
    ("mxfp8", say(weight_block_size=[1, 48]), "64 columns cannot be divided into groups of 48"),
    ("nvfp4", drop("weight_scale_2"), r"float8_e4m3fn, and .*weight_scale_2 is missing"),
    ("nvfp4", put("pre_quant_scale", torch.ones(64)), r"pre_quant_scale changes the inputs"),
    ("nvfp4", drop("weight_scale"), r"q_proj\.weight\S* belongs to no packed weight"),
    ("int4", drop("weight_scale"), r"weight_packed .*weight_scale is missing"),
    ("int4", set_weights(group_size=16), r"shape \[32, 2\], config\.json says \[32, 4\]"),
    ("int4", set_weights(group_size=24), "64 columns cannot be divided into groups of 24"),
    ("int4", put("weight", torch.ones(32, 64)), r"two tensors for .*q_proj\.weight"),
    ("awq", drop("qzeros"), r"qzeros is missing"),
    ("awq", drop("qweight"), r"(scales|qzeros) belongs to no packed weight"),
    ("gptq", put("scales", torch.ones(3, 32).half()), r"scales has the shape \[3, 32\]"),
    ("gptq", put("g_idx", torch.zeros(3).int()), r"g_idx has the shape \[3\]"),
    ("gptq", say(bits=8), r"scales has the shape \[2, 32\], config\.json says \[1, 32\]"),
]


@pytest.mark.parametrize(("name", "change", "error"), TENSORS)
def test_tensors_that_do_not_fit_the_config_are_named(
    name: str, change: Any, error: str, plain: Path, tmp_path: Path
) -> None:
    folder = packed(plain, tmp_path / "packed", name, change)
    with pytest.raises(CheckpointError, match=error) as raised:
        CheckpointFolder(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


VALUES: list[tuple[str, Any, str]] = [
    ("gptq", put("g_idx", torch.arange(64).flip(0).int() // 32), r"g_idx gives .*desc_act"),
    ("int4", put("weight_g_idx", torch.zeros(64).int()), r"weight_g_idx gives columns"),
    ("int4", put("weight_shape", torch.tensor([32, 60])), r"weight_shape is \[32, 60\]"),
    ("mxfp8", put("weight_scale_inv", torch.full((32, 2), 255).byte()), "infinite or NaN"),
    ("fp8-block", put("weight_scale_inv", torch.full((1, 1), torch.inf)), "infinite or NaN"),
    (
        "fp8-block",
        put("weight", torch.full((32, 64), 255, dtype=torch.uint8).view(torch.float8_e4m3fn)),
        r"q_proj\.weight has codes that are NaN",
    ),
    ("nvfp4-compressed", put("weight_global_scale", torch.zeros(1)), "infinite or NaN"),
]


@pytest.mark.parametrize(("name", "change", "error"), VALUES)
def test_values_that_are_none_are_named(
    name: str, change: Any, error: str, plain: Path, tmp_path: Path
) -> None:
    folder = packed(plain, tmp_path / "packed", name, change)
    with CheckpointFolder(folder) as checkpoint, pytest.raises(CheckpointError, match=error):
        checkpoint.read_whole(f"{Q}.weight")


COMPRESSED = "compressed-tensors"


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"\(bitsandbytes\); .* bf16"),
        ({"quant_method": "hqq"}, r"\(hqq\); Overspill reads weights packed as MXFP4"),
        ({"bits": 4}, r"\(unknown\)"),
        ({"quant_method": ["awq"]}, r"is quantized \(\['awq'\]\)"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act=true"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size 'x'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"of the size \[128\]"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo='W4A16_AWQ'"),
        ({"quant_method": COMPRESSED, "transform_config": {"a": 1}}, "rotated weights"),
        ({"quant_method": COMPRESSED}, "config_groups=None"),
        (
            {"quant_method": COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse-24-bitmask",
        ),
        (MAKE["integers"](strategy="group", group_size=32, actorder="group"), "actorder='group'"),
        (MAKE["compressed"]("pack-quantized", type="int", num_bits=3, strategy="channel"), "=3"),
        (MAKE["integers"](strategy="token"), "strategy='token'"),
    ],
)
def test_what_cannot_be_unpacked_is_refused_by_the_config(
    config: dict[str, Any], error: str, tmp_path: Path
) -> None:
    text = {"model_type": "mixtral", "num_local_experts": 8}
    file = tmp_path / "config.json"
    for place in (
        {"quantization_config": config},
        {"compression_config": config},
        {"text_config": {"quantization_config": config}},
    ):
        file.write_text(json.dumps(text | place))
        with pytest.raises(ConfigError, match=error) as raised:
            check_checkpoint(tmp_path)
        assert str(tmp_path) in str(raised.value)
        assert "give the checkpoint in bf16" in str(raised.value)


def test_a_file_of_modelopt_is_a_config(plain: Path, tmp_path: Path) -> None:
    folder = packed(plain, tmp_path / "packed", "nvfp4", lambda tensors, config: None)
    text = json.loads((folder / "config.json").read_text())
    given = text.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(text))
    with pytest.raises(OverspillError, match=r"belongs to no|no quantization_config"):
        CheckpointFolder(folder)
    file = folder / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": given}))
    with CheckpointFolder(folder) as checkpoint:
        assert checkpoint.packed.keys() == {f"{Q}.weight"}
    for broken in ("{", "[]", '{"quantization": 1}'):
        file.write_text(broken)
        with pytest.raises(CheckpointError, match=r"hf_quant_config\.json cannot be used"):
            check_checkpoint(folder)
