"""Packed checkpoints are what the plain checkpoints of their products are, bit for bit."""

import dataclasses
import json
import runpy
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import overspill
from overspill.models.huggingface.folder import CheckpointFolder
from tests.models.huggingface.families import make_batch, make_model, tiny
from tests.models.huggingface.oracle import MODES, budgets
from tests.models.huggingface.packed.naive import dequantized
from tests.models.huggingface.test_exactness import BY_NAME
from tests.models.huggingface.test_load import again, outputs, tensors

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


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    yield (made := _Pairs(tmp_path_factory.mktemp("packed")))
    made.clear()


class _Pairs(dict[str, Pair]):
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


@pytest.mark.parametrize("name", CASES)
def test_a_packed_checkpoint_is_the_plain_one(
    name: str, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    pair = pairs[name]
    mode = list(MODES)[list(CASES).index(name) % len(MODES)]
    eager = again(pair.family, pair.plain)
    batch = make_batch(pair.family, eager)
    model = load(pair.packed, mode=mode, train=False)
    try:
        assert not hasattr(model.config, "quantization_config")
        state = model.state_dict()
        for key, value in eager.state_dict().items():
            assert torch.equal(state[key], value), key
        torch.testing.assert_close(
            outputs(model, batch), outputs(eager, batch), rtol=1e-4, atol=1e-5
        )
        overspill.save(model, tmp_path / "saved")
    finally:
        model.overspill.close()
    saved, plain = tensors(tmp_path / "saved"), tensors(pair.plain)
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[key], value) for key, value in plain.items())
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_the_nearest_of_the_product(name: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[name]
    with CheckpointFolder(pair.packed) as packed, CheckpointFolder(pair.plain) as plain:
        assert packed.specs == plain.specs
        for key, spec in plain.specs.items():
            rounded = torch.empty(spec.shape, dtype=torch.bfloat16)
            packed.read(key, 0, rounded)
            assert torch.equal(rounded, plain.read_whole(key).bfloat16()), key


def test_what_is_generated_and_trained_is_the_same(pairs: dict[str, Pair]) -> None:
    tokens, losses = [], []
    for folder in (pairs["fp8-block"].packed, pairs["fp8-block"].plain):
        llm = overspill.LLM(folder, dtype="float32", device="cpu", slots=3)
        asked = overspill.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        made = llm.generate([[3, 4, 5], [9, 8]], asked)
        tokens.append([each.token_ids for each in made])
        llm.close()
        model = load(folder)
        batch = make_batch(pairs["fp8-block"].family, model)
        optimizer = overspill.AdamW(model, lr=0.01)
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(model(**batch).loss.item())
        model.overspill.close()
        assert losses[-1] < loss.item()
    assert tokens[0] == tokens[1]
    assert losses[0] == losses[1]


def test_an_adapter_is_served_on_and_merged_into_a_packed_model(
    pairs: dict[str, Pair], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    for name, family in (("int4", "mixtral"), ("mxfp4", "gpt_oss")):
        pair = pairs[name]
        plain = again(pair.family, pair.plain)
        batch = make_batch(pair.family, plain)
        targets = ["experts.down_proj"]
        config = peft.LoraConfig(
            target_modules=["q_proj"], target_parameters=targets, r=2, init_lora_weights=False
        )
        adapted = peft.get_peft_model(plain, config)
        adapter, merged = tmp_path / f"adapter-{family}", tmp_path / family
        adapted.save_pretrained(adapter)
        overspill.merge(adapter, merged, pair.packed)
        loaded = again(pair.family, merged)
        torch.testing.assert_close(
            outputs(loaded, batch), outputs(adapted, batch), rtol=1e-4, atol=1e-5
        )
        asked = overspill.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        tokens = []
        for folder, given in ((pair.packed, adapter), (merged, None)):
            with overspill.LLM(folder, device="cpu", dtype="float32", adapter=given) as llm:
                tokens.append(llm.generate([[3, 4, 5]], asked)[0].token_ids)
        assert tokens[0] == tokens[1]


def test_the_merged_files_are_plain_ones(pairs: dict[str, Pair], tmp_path: Path) -> None:
    """Codes and scales of a tensor may be in different files of the packed checkpoint."""
    peft = pytest.importorskip("peft")
    pair, packed = pairs["nvfp4"], tmp_path / "packed"
    shutil.copytree(pair.packed, packed)
    stored = list(load_file(packed / "model.safetensors").items())
    files: dict[str, str] = {}
    for number in range(3):
        part = dict(stored[number::3])
        save_file(part, packed / f"part-{number}.safetensors")
        files |= dict.fromkeys(part, f"part-{number}.safetensors")
    (packed / "model.safetensors").unlink()
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config = json.loads((packed / "config.json").read_text())
    quantization = {"quantization": config.pop("quantization_config")}
    (packed / "hf_quant_config.json").write_text(json.dumps(quantization))
    (packed / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    plain = again(pair.family, pair.plain)
    adapter = peft.LoraConfig(target_modules=["q_proj"], r=2)  # changes nothing yet
    peft.get_peft_model(plain, adapter).save_pretrained(tmp_path / "adapter")
    merged = overspill.merge(tmp_path / "adapter", tmp_path / "merged", packed)
    assert not (tmp_path / "merged" / "hf_quant_config.json").exists()
    size = sum(file.stat().st_size for file in (tmp_path / "merged").glob("*.safetensors"))
    assert size == pytest.approx(merged.bytes, rel=0.1)
    for key, value in tensors(pair.plain).items():
        found = tensors(tmp_path / "merged")[key]
        assert torch.equal(found, value.to(found.dtype))
        assert found.dtype == (torch.bfloat16 if "_proj" in key else value.dtype)
    with CheckpointFolder(tmp_path / "merged") as checkpoint:  # checks the index
        assert not checkpoint.packed
