"""Checks of a checkpoint by config.json and the names of files, without torch."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import overspill
from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.checks import (
    check_checkpoint,
    check_tokenizer,
    find_folder,
    read_json_config,
)
from tests.models.huggingface.families import FAMILIES, cases

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
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "hqq"),
        ({"quantization_config": {"bits": 4}}, "unknown"),
        ({"compression_config": {"quant_method": "quark"}}, "quark"),
        ({"text_config": {"quantization_config": {"quant_method": "quanto"}}}, "quanto"),
    ],
)
def test_every_place_of_a_quantization_is_known(
    config: dict[str, Any], method: str, tmp_path: Path
) -> None:
    folder = _write(tmp_path / "model", **config)
    with pytest.raises(ConfigError, match=rf"is quantized \({method}\); .* the base model$"):
        check_checkpoint(folder)
    _write(tmp_path / "model", "model.safetensors", quantization_config=None)
    assert check_checkpoint(folder) == folder


def test_a_gguf_file_of_the_hub_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "Q4").mkdir()
    (tmp_path / "Q4" / "a-00001-of-00002.gguf").touch()
    first, second = "Q4/a-00001-of-00002.gguf", "Q4/a-00002-of-00002.gguf"
    assert find_folder(f"org/moe-GGUF/{first}") == tmp_path / first
    assert asked == [("org/moe-GGUF", [first, second])]
    with pytest.raises(CheckpointError, match=rf"{second} is missing"):
        check_checkpoint(f"org/moe-GGUF/{first}")
    with pytest.raises(ConfigError, match=r"org/moe-GGUF has no file b\.gguf; see its page"):
        check_checkpoint("org/moe-GGUF/b.gguf")
    message = r"org/moe-GGUF has GGUF files, .*give org/moe-GGUF/FILE\.gguf"
    with pytest.raises(ConfigError, match=message):
        check_checkpoint("org/moe-GGUF")
    with pytest.raises(ConfigError, match=r"no/such/file\.txt does not exist"):
        check_checkpoint("no/such/file.txt")


def test_weights_of_the_hub_are_downloaded_after_the_config_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        assert name == "some/model"
        asked.append("*.safetensors" in allow_patterns)
        return str(tmp_path / "cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = _write(tmp_path / "cached", quantization_config={"quant_method": "hqq"})
    with pytest.raises(ConfigError, match=r"is quantized \(hqq\)"):
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
