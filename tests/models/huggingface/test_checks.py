"""What config.json and the names of files say about a checkpoint, without torch."""

import json
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import overspill
from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.checks import (
    check_checkpoint,
    check_tokenizer,
    find_folder,
    read_json_config,
)
from tests.models.huggingface.families import FAMILIES, cases, make_model
from tests.models.huggingface.test_exactness import BY_NAME

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8}


def _write(folder: Path, *empty: str, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MIXTRAL, **config}))
    for name in empty:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("family", cases(FAMILIES))
def test_every_family_names_its_experts(family: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(family.build().to_json_string())
    assert read_json_config(tmp_path)["model_type"] == family.build().model_type


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gemma4", "phi3", "gpt2", "falcon", "t5"],
)
def test_a_dense_model_is_refused(model_type: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    (tmp_path / "config.json").write_text(CONFIG_MAPPING[model_type]().to_json_string())
    with pytest.raises(ConfigError, match=rf"is a dense model \({model_type}\).*families\.md"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"bits": 4}}, "unknown"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({}, "modelopt"),
    ],
)
def test_every_place_of_a_quantization_is_known(
    config: dict[str, Any], method: str, tmp_path: Path
) -> None:
    folder = _write(tmp_path / "model", *([] if config else ["hf_quant_config.json"]), **config)
    with pytest.raises(ConfigError, match=rf"is quantized \({method}\); .* the base model$"):
        check_checkpoint(folder)
    _write(tmp_path / "model", "model.safetensors", quantization_config=None)
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    assert check_checkpoint(folder) == folder


def test_the_command_for_a_quantized_checkpoint_makes_one_that_can_be_loaded(
    tmp_path: Path,
) -> None:
    from tests.train.finetune.tiny import make_tokenizer

    folder = tmp_path / "fp8"
    plain = make_model(BY_NAME["qwen3_moe"], dtype=torch.bfloat16)
    plain.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        weight = tensors[name].float()
        scale = weight.abs().amax() / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        grid = [-(-length // 8) for length in weight.shape]
        tensors[f"{name}_scale_inv"] = scale.expand(grid).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
    quantized["modules_to_not_convert"] = ["lm_head", "gate", "self_attn"]
    config["quantization_config"] = quantized
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"is quantized \(fp8\); .*make it with: python") as error:
        overspill.load(folder)
    found = re.search(r'make it with: python -c "([^"]*)"$', str(error.value))
    assert found is not None
    exec(found[1], {})
    check_tokenizer(tmp_path / "fp8-bf16", "MODEL")
    loaded = overspill.load(
        tmp_path / "fp8-bf16", train=False, device="cpu", quiet=True, progress=False
    )
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits, expected = loaded(ids).logits.float(), plain.eval()(ids).logits.float()
    loaded.overspill.close()
    # an e4m3 has 3 bits after the leading one
    assert (logits - expected).norm() < 0.1 * expected.norm()


def test_gguf_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.Q4_K_M.gguf").touch()
    message = r"a\.Q4_K_M\.gguf is a GGUF file; Overspill reads safetensors .*base model$"
    for given in (tmp_path / "a.Q4_K_M.gguf", tmp_path):
        with pytest.raises(ConfigError, match=message):
            check_checkpoint(given)
    with pytest.raises(ConfigError, match=message):
        check_checkpoint(_write(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: tmp_path / "none")
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3-30B-A3B-GGUF has GGUF files; .*base model$"):
        check_checkpoint("Qwen/Qwen3-30B-A3B-GGUF")


def test_weights_of_the_hub_are_downloaded_after_the_config_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        assert name == "some/model"
        asked.append("*.safetensors" in allow_patterns)
        return str(tmp_path / "cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = _write(tmp_path / "cached", quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigError, match=r"is quantized \(awq\)"):
        find_folder("some/model")
    assert asked == [False]
    _write(folder, "model.safetensors")
    assert find_folder("some/model") == folder
    assert asked == [False, False, True]


def test_an_adapter_is_not_taken_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a LoRA adapter, not a whole model"):
        overspill.load(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: tmp_path)
    assert find_folder("some/adapter") == check_checkpoint("some/adapter") == tmp_path
    assert check_checkpoint(_write(tmp_path, "model.safetensors")) == tmp_path


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "Expecting"), ("[]", "not a JSON object"), ("[" * 10**5, "nested too deeply")],
)
def test_a_config_that_is_no_json_object_is_named(
    content: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"config\.json cannot be used: .*{reason}"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize("depth", [100, 500, 900, 980])
def test_a_config_of_any_depth_is_read(depth: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * depth + '{"moe": 1}' + "}" * depth)
    try:
        assert read_json_config(tmp_path)
    except CheckpointError as error:
        assert "nested too deeply" in str(error)  # noqa: PT017 - either is right


@pytest.mark.parametrize("named", [7, {}, [], [7], ["M; import os"], "M"])
def test_commands_contain_no_more_than_a_name_of_a_config(named: Any, tmp_path: Path) -> None:
    folder = _write(tmp_path, "pytorch_model.bin", architectures=named)
    with pytest.raises(CheckpointError, match=r"as T, AutoModelForCausalLM as M; M\.from_pre"):
        check_checkpoint(folder)
    _write(tmp_path, quantization_config={"quant_method": named})
    with pytest.raises(ConfigError, match="is quantized"):
        check_checkpoint(folder)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match=r"a\.txt is a file; give the folder of a checkpoint"):
        check_checkpoint(tmp_path / "a.txt")
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor .*; download"):
        check_checkpoint(_write(tmp_path / "bare"))
    with pytest.raises(ConfigError, match=r"MODEL .*bare has no tokenizer; copy tokenizer\.json"):
        check_tokenizer(tmp_path / "bare", "MODEL")
