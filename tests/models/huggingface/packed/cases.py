"""Packed checkpoints of all formats, and the plain ones of their products."""

import dataclasses
import json
import runpy
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import overspill
from tests.models.huggingface.families import make_model, tiny
from tests.models.huggingface.oracle import budgets
from tests.models.huggingface.packed.naive import dequantized
from tests.models.huggingface.test_exactness import BY_NAME

ROOT = Path(__file__).resolve().parents[4]
MAKE = runpy.run_path(str(ROOT / "examples" / "make_tiny_checkpoint.py"))
# format → family, changes of its config, changes of the quantization
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mxfp4": ("gpt_oss", {"intermediate_size": 64}, {}),
    "mxfp8": ("mixtral", {"intermediate_size": 64}, {}),
    # 24 rows and 32 columns: the last blocks are partial
    "fp8-block": ("qwen3_moe", {}, {"weight_block_size": [10, 12]}),
    "fp8-channel": ("deepseek_v3", {"num_hidden_layers": 2}, {}),
    "fp8-tensor": ("mixtral", {"intermediate_size": 24}, {}),
    "nvfp4": ("qwen3_moe", {"moe_intermediate_size": 48}, {}),
    "nvfp4-compressed": ("mixtral", {"intermediate_size": 48}, {}),
    "int4": ("mixtral", {"intermediate_size": 64}, {}),
    "int4-asymmetric": ("mixtral", {"intermediate_size": 64}, {}),
    "int4-channel": ("mixtral", {"intermediate_size": 24}, {}),
    "awq": ("mixtral", {"intermediate_size": 64}, {"group_size": 16}),
    "gptq": ("mixtral", {"intermediate_size": 64}, {"group_size": 16}),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A packed checkpoint, and the plain one of its products in float32."""

    family: Any
    packed: Path
    plain: Path


class Pairs(dict[str, Pair]):
    """Pairs by format, made when they are used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> Pair:
        family_name, fields, changes = CASES[name]
        build = partial(tiny, family_name, **fields)
        family = dataclasses.replace(BY_NAME[family_name], build=build)
        folder = self._folder / name
        make_model(family).save_pretrained(folder / "packed")
        MAKE["pack"](folder / "packed", name, **changes)
        shutil.copytree(folder / "packed", folder / "plain")
        save_file(
            dequantized(folder / "packed"), folder / "plain" / "model.safetensors", {"format": "pt"}
        )
        edit(folder / "plain", quantization_config=None)
        self[name] = Pair(family, folder / "packed", folder / "plain")
        return self[name]


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def load(folder: Path, dtype: torch.dtype = torch.float32, mode: str = "host", **more: Any) -> Any:
    return overspill.load(folder, dtype=dtype, **budgets(mode, folder / "spill"), **more)
