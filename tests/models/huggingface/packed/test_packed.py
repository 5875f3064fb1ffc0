"""Packed checkpoints are what the plain checkpoints of their products are, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import overspill
from overspill.models.huggingface.folder import CheckpointFolder
from tests.models.huggingface.families import make_batch
from tests.models.huggingface.oracle import MODES
from tests.models.huggingface.packed.cases import CASES, Pairs, load
from tests.models.huggingface.test_load import again, outputs, tensors


@pytest.mark.parametrize("name", CASES)
def test_a_packed_checkpoint_is_the_plain_one(name: str, pairs: Pairs, tmp_path: Path) -> None:
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
def test_bfloat16_is_the_nearest_of_the_product(name: str, pairs: Pairs) -> None:
    pair = pairs[name]
    with CheckpointFolder(pair.packed) as packed, CheckpointFolder(pair.plain) as plain:
        assert packed.specs == plain.specs
        for key, spec in plain.specs.items():
            rounded = torch.empty(spec.shape, dtype=torch.bfloat16)
            packed.read(key, 0, rounded)
            assert torch.equal(rounded, plain.read_whole(key).bfloat16()), key


def test_what_is_generated_and_trained_is_the_same(pairs: Pairs) -> None:
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


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_an_adapter_is_merged_into_a_packed_model(name: str, pairs: Pairs, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pair = pairs[name]
    plain = again(pair.family, pair.plain)
    batch = make_batch(pair.family, plain)
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["experts.down_proj"],
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(plain, config)
    adapted.save_pretrained(tmp_path / "adapter")
    overspill.merge(tmp_path / "adapter", tmp_path / "merged", pair.packed)
    expected = outputs(adapted, batch)
    loaded = again(pair.family, tmp_path / "merged")
    torch.testing.assert_close(outputs(loaded, batch), expected, rtol=1e-4, atol=1e-5)
    served = load(pair.packed, train=False, adapter=tmp_path / "adapter")
    torch.testing.assert_close(outputs(served, batch), expected, rtol=1e-4, atol=1e-5)
    served.overspill.close()


def test_the_merged_files_are_plain_ones(pairs: Pairs, tmp_path: Path) -> None:
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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp4", "fp8-block"])
def test_a_gpu_gets_unpacked_weights(name: str, pairs: Pairs) -> None:
    pair = pairs[name]
    model = overspill.load(
        pair.packed, dtype=torch.float32, device="cuda", mode="host", slots=3, train=False,
        quiet=True, progress=False,
    )  # fmt: skip
    state = model.state_dict()
    for key, value in again(pair.family, pair.plain).state_dict().items():
        assert torch.equal(state[key].cpu(), value), key
    model.overspill.close()
