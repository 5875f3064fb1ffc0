"""A GGUF file is the model that llama.cpp's converter has made it from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import overspill
from overspill.core.errors import ConfigError
from overspill.models.huggingface.folder import CheckpointFolder, read_config
from tests.models.huggingface.families import make_batch
from tests.models.huggingface.gguf.cases import CASES, load, make_case
from tests.models.huggingface.oracle import MODES
from tests.models.huggingface.test_load import outputs


@pytest.mark.parametrize("name", CASES)
def test_config_weights_and_logits_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """Without a config.json: from metadata."""
    family, model = make_case(CASES[name], tmp_path / "model.gguf")
    batch = make_batch(family, model)
    mode = list(MODES)[list(CASES).index(name) % len(MODES)]
    loaded = load(tmp_path / "model.gguf", mode)
    state = loaded.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(state[key] + 0, value), key
    torch.testing.assert_close(outputs(loaded, batch), outputs(model, batch), rtol=1e-4, atol=1e-5)
    loaded.overspill.close()
    for key, value in read_config(tmp_path / "model.gguf").to_dict().items():
        if key in ("eos_token_id", "rms_norm_eps", "num_experts_per_tok", "hidden_size"):
            assert value == pytest.approx(model.config.to_dict()[key], rel=1e-6), key


def test_bfloat16_is_the_default_and_the_nearest(tmp_path: Path) -> None:
    _, model = make_case(CASES["qwen3moe-k"], tmp_path / "model.gguf")
    loaded = load(tmp_path / "model.gguf", dtype=None)
    state = loaded.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(state[key] + 0, value.bfloat16()), key
    loaded.overspill.close()
    with CheckpointFolder(tmp_path / "model.gguf") as checkpoint:
        assert checkpoint.plain_dtype(read_config(tmp_path / "model.gguf")) == torch.bfloat16
        for name, spec in checkpoint.specs.items():
            rounded = torch.empty(spec.shape, dtype=torch.bfloat16)
            checkpoint.read(name, 0, rounded)
            assert torch.equal(rounded, checkpoint.read_whole(name).bfloat16()), name


def test_several_files_and_a_folder_with_a_config(tmp_path: Path) -> None:
    """Any of the files may be given, or their folder."""
    family, model = make_case(CASES["mixtral"], tmp_path / "model.gguf", split_max_tensors=9)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 2
    # what only a config.json can say
    model.config.router_jitter_noise = 0.25
    model.config.save_pretrained(tmp_path)
    expected = outputs(model, make_batch(family, model))
    for path in (files[0], files[-1], tmp_path):
        loaded = load(path)
        assert loaded.config.router_jitter_noise == 0.25
        found = outputs(loaded, make_batch(family, model))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        loaded.overspill.close()


def test_an_unknown_architecture_has_its_config_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tensors have the usual names."""
    path = tmp_path / "model.gguf"
    family, model = make_case(CASES["qwen3moe"], path)
    path.write_bytes(path.read_bytes().replace(b"qwen3moe", b"qwen9moe"))
    with pytest.raises(ConfigError, match=r"model of qwen9moe; .*others only with config\.json"):
        load(path)
    model.config.save_pretrained(tmp_path)
    loaded = load(path)
    batch = make_batch(family, model)
    torch.testing.assert_close(outputs(loaded, batch), outputs(model, batch), rtol=1e-4, atol=1e-5)
    loaded.overspill.close()
    assert "model of qwen9moe, which Overspill does not know" in caplog.text

    path.write_bytes(path.read_bytes().replace(b"qwen9moe", b"mistral4"))
    with pytest.raises(ConfigError, match=r"mistral4, whose files have rows of queries and keys"):
        load(path)


def test_an_adapter_is_trained_and_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    path = tmp_path / "model.gguf"
    family, model = make_case(CASES["mixtral"], path, split_max_tensors=9)
    (path,) = tmp_path.glob("*-00001-of-*.gguf")
    batch = make_batch(family, model)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"],
        init_lora_weights=False,
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = outputs(adapted, batch)
    served = load(path, adapter=tmp_path / "adapter")
    torch.testing.assert_close(outputs(served, batch), expected, rtol=1e-4, atol=1e-5)
    served.overspill.close()
    overspill.merge(tmp_path / "adapter", tmp_path / "merged", path)
    merged = overspill.load(
        tmp_path / "merged", dtype=torch.float32, device="cpu", train=False, quiet=True,
        progress=False,
    )  # fmt: skip
    # merged in bfloat16
    torch.testing.assert_close(outputs(merged, batch), expected, rtol=0.05, atol=0.1)
    merged.overspill.close()
    config_json = json.loads((tmp_path / "merged/config.json").read_text())
    assert config_json["model_type"] == "mixtral"


def test_it_is_trained_and_saved_as_a_plain_checkpoint(tmp_path: Path) -> None:
    family, model = make_case(CASES["qwen2moe"], tmp_path / "model.gguf")
    loaded = load(tmp_path / "model.gguf", train=True)
    overspill.save(loaded, tmp_path / "saved")
    batch = make_batch(family, model)
    optimizer = overspill.AdamW(loaded, lr=0.01)
    losses = []
    for _ in range(3):
        loss = loaded(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    loaded.overspill.close()
    assert losses[2] < losses[0]
    saved: dict[str, Any] = {}
    for file in (tmp_path / "saved").glob("*.safetensors"):
        saved |= load_file(file)
    norms = [key for key in saved if "norm" in key]
    assert norms
    assert all(torch.equal(saved[key], model.state_dict()[key]) for key in norms)
