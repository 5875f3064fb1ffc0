"""Quantized checkpoints: the records that `quantize=` makes, and what others read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import overspill
from overspill.core.errors import CheckpointError, ConfigError, DiskError
from overspill.core.experts import ExpertId
from overspill.models.fill import ExpertSource
from overspill.models.huggingface.find_experts import find_experts
from overspill.models.huggingface.folder import CheckpointFolder, read_config
from overspill.models.huggingface.packed.quantized import QuantizedExperts
from overspill.models.huggingface.packed.records import PackedExperts
from overspill.models.huggingface.recipes import Recipes
from overspill.models.huggingface.skeleton import meta_model
from overspill.train.export import export
from tests.full_disk import largest_file
from tests.models.huggingface.families import make_model
from tests.models.huggingface.gguf.cases import CASES as CASES_OF_GGUF
from tests.models.huggingface.gguf.cases import make_case
from tests.models.huggingface.packed.cases import Pairs
from tests.models.huggingface.packed.test_quantized import make
from tests.models.huggingface.test_load import again

SMALL = {"moe_intermediate_size": 64}
WHOLE = {"moe_intermediate_size": 128, "hidden_size": 128}
# family, changes of its config, format, what reads it beside Overspill
CASES: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("mixtral", {"intermediate_size": 64}, "int4", "compressed_tensors"),
    ("qwen3_moe", SMALL, "mxfp4", "compressed_tensors"),
    ("qwen3_moe", WHOLE, "fp8", "transformers"),
    ("qwen3_moe", {"moe_intermediate_size": 160, "hidden_size": 64}, "fp8", ""),
    ("gpt_oss", {"intermediate_size": 64}, "mxfp4", "transformers"),
    ("deepseek_v3", {**SMALL, "num_hidden_layers": 2}, "int4", "compressed_tensors"),
    ("qwen3_5_moe_text", SMALL, "int4", "compressed_tensors"),
    ("nllb-moe", {}, "fp8", ""),
)


def plain_checkpoint(name: str, fields: dict[str, Any], folder: Path, **more: Any) -> Path:
    make_model(make(name, fields)).bfloat16().save_pretrained(folder / "plain", **more)
    return folder / "plain"


def records(folder: Path, quantize: str | None) -> tuple[Any, dict[ExpertId, Tensor]]:
    """The format and the bytes of the records of all experts."""
    with CheckpointFolder(folder) as checkpoint:
        model = meta_model(read_config(folder))
        recipes = Recipes(model, find_experts(model), checkpoint)
        source: ExpertSource = (
            PackedExperts(recipes, checkpoint)
            if quantize is None
            else QuantizedExperts(recipes, quantize)
        )
        made = {}
        for layer, experts in enumerate(recipes.layers):
            for index in range(experts.n_experts):
                record = torch.zeros(source.format.nbytes, dtype=torch.uint8)
                source.fill(ExpertId(layer, index), record)
                made[ExpertId(layer, index)] = record
        return source.format, made


def assert_same_records(plain: Path, out: Path, quantize: str) -> None:
    expected, mine = records(plain, quantize)
    found, theirs = records(out, None)
    assert found == expected
    assert all(torch.equal(theirs[expert], record) for expert, record in mine.items())


@pytest.mark.parametrize(("name", "fields", "quantize", "reader"), CASES)
def test_an_export_has_the_records_of_quantize(
    name: str, fields: dict[str, Any], quantize: str, reader: str, tmp_path: Path
) -> None:
    plain, out = plain_checkpoint(name, fields, tmp_path), tmp_path / "out"
    done = export(plain, out, quantize=quantize)
    assert (done.model_type, done.quantize) == (read_config(plain).model_type, quantize)
    size = (out / "model.safetensors").stat().st_size
    assert done.bytes <= size <= done.bytes * 1.5
    assert_same_records(plain, out, quantize)
    before, after = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
    others = {key for key in before if ".experts." not in key or "bias" in key}
    assert others == {key for key in after if ".experts." not in key or "bias" in key}
    assert all(torch.equal(before[key], after[key]) for key in others)
    dense = [key.removesuffix(".weight") for key in before if key.endswith("proj.weight")]
    dense = [key for key in dense if ".experts." not in key]
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {"lm_head", *dense} <= set(config.get("ignore") or config["modules_to_not_convert"])
    if reader:
        assert_transformers_reads(plain, out, quantize, reader)


def assert_transformers_reads(plain: Path, out: Path, quantize: str, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} reads the format for transformers")
    theirs = again(make(read_config(plain).model_type, {}), out)
    model = overspill.load(
        plain, train=False, device="cpu", quiet=True, progress=False, quantize=quantize
    )
    mine = model.state_dict()
    state = {key: value for key, value in theirs.state_dict().items() if key in mine}
    assert sum("experts" in key for key in state) >= 4
    for key, value in state.items():
        assert torch.equal(mine[key] + 0, value.to(mine[key].dtype)), key
    model.overspill.close()


@pytest.mark.parametrize("quantize", ["int4", "mxfp4"])
def test_compressed_tensors_computes_the_same_values(quantize: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="it has the reference decoders of its formats")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    plain = plain_checkpoint("mixtral", {"intermediate_size": 64}, tmp_path)
    export(plain, tmp_path / "out", quantize=quantize)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    stored = load_file(tmp_path / "out" / "model.safetensors")
    with CheckpointFolder(tmp_path / "out") as checkpoint:
        assert len(checkpoint.packed) == 2 * 4 * 3
        for name in checkpoint.packed:
            base = name.removesuffix("weight")
            parts = {k.removeprefix(base): v for k, v in stored.items() if k.startswith(base)}
            values = compressor.decompress(parts, scheme)["weight"]
            assert torch.equal(values.float(), checkpoint.read_whole(name).bfloat16().float())


def test_shards_and_other_files_stay(tmp_path: Path) -> None:
    plain = plain_checkpoint("mixtral", {"intermediate_size": 64}, tmp_path, max_shard_size="20KB")
    (plain / "tokenizer.json").write_text("{}")
    (plain / "pregates.safetensors").write_bytes(b"gates")
    out = tmp_path / "out"
    done = export(plain, out, quantize="int4")
    names = {file.name for file in plain.iterdir()}
    assert {file.name for file in out.iterdir()} == names
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.bytes
    for name in names:
        if name.endswith("safetensors"):
            same = name == "pregates.safetensors"
            assert same or set(load_file(out / name)) == {
                key for key, file in index["weight_map"].items() if file == name
            }
    assert (out / "pregates.safetensors").read_bytes() == b"gates"
    assert_same_records(plain, out, "int4")


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
def test_stacks_become_experts_of_their_own(quantize: str, tmp_path: Path) -> None:
    plain = plain_checkpoint("qwen3_moe", WHOLE, tmp_path, save_original_format=False)
    assert any(
        key.endswith("experts.gate_up_proj") for key in load_file(plain / "model.safetensors")
    )
    export(plain, tmp_path / "out", quantize=quantize)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert any(".experts.3.gate_proj.weight" in key for key in found)
    assert_same_records(plain, tmp_path / "out", quantize)


def test_an_export_is_written_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, out = plain_checkpoint("mixtral", {"intermediate_size": 64}, tmp_path), tmp_path / "out"
    with (
        largest_file(20_000),
        pytest.raises(DiskError, match=r"cannot be written .*File too large"),
    ):
        export(plain, out, quantize="int4")
    with monkeypatch.context() as patch:
        patch.setattr("overspill.tiers.aside.disk_free", lambda path: 1000)
        with pytest.raises(DiskError, match=r"the checkpoint needs .*, the disk has 1000"):
            export(plain, out, quantize="int4")
    tensors = load_file(plain / "model.safetensors")
    key = next(key for key in tensors if ".experts.2." in key)
    tensors[key][3, 4] = torch.inf
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{key} has weights that are infinite, NaN or beyo"):
        export(plain, out, quantize="int4")
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


def test_what_has_no_quantized_form_is_refused(
    pairs: Pairs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, message in [
        ("gpt_oss", "other programs read gpt-oss in MXFP4 only; give --quantize mxfp4, or load"),
        ("granitemoe", "granitemoe has stacks of experts, for which there is no quantized form"),
        ("qwen3_vl_moe", "qwen3_vl_moe has experts in a layout of its own"),
    ]:
        plain = plain_checkpoint(name, {}, tmp_path / name)
        with pytest.raises(ConfigError, match=message):
            export(plain, tmp_path / "out", quantize="fp8")
    with pytest.raises(ConfigError, match=r"--quantize fp8: .*is quantized already \(model"):
        export(pairs["int4"].packed, tmp_path / "out", quantize="fp8")
    gguf = tmp_path / "model.gguf"
    make_case(CASES_OF_GGUF["olmoe"], gguf)
    with pytest.raises(
        ConfigError, match=r"--quantize int4: .*is a GGUF file; give the checkpoint"
    ):
        export(gguf, tmp_path / "out", quantize="int4")
    with pytest.raises(ConfigError, match="is a checkpoint of Hugging Face already; --quantize"):
        export(pairs["int4"].plain, tmp_path / "out")
    with pytest.raises(ConfigError, match="--tokenizer is for runs"):
        export(pairs["int4"].plain, tmp_path / "out", "bytes", quantize="int4")
    with pytest.raises(ConfigError, match="does not exist; give the folder of a checkpoint, a"):
        export(tmp_path / "none", tmp_path / "out", quantize="int4")
    assert not (tmp_path / "out").exists()
    plain = plain_checkpoint("mixtral", {"intermediate_size": 24}, tmp_path)
    with pytest.raises(ConfigError, match=r"groups of 32 weights, and rows of .* have 24"):
        export(plain, tmp_path / "out", quantize="int4")
    export(plain, tmp_path / "out", quantize="fp8")
    assert "not multiples of 128x128: Overspill reads partial blocks" in caplog.text
