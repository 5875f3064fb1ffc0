"""Experts that stay packed, in every tier, compute what unpacked ones do."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import overspill
from overspill.compute.record_format import RecordFormat
from overspill.core.errors import ConfigError
from overspill.moe import unpacking
from overspill.plan.usage import Swap
from tests.models.huggingface.families import make_batch
from tests.models.huggingface.oracle import MODES
from tests.models.huggingface.packed.cases import CASES, Pairs, load
from tests.models.huggingface.test_load import again, outputs, tensors
from tests.slow import slow_names, slow_rows

SLOW = "mxfp8", "fp8-tensor", "nvfp4-compressed", "int4", "int4-channel"  # read like others


@pytest.mark.parametrize("name", slow_names(CASES, *SLOW))
def test_packed_experts_are_the_unpacked_ones(
    name: str, pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts with few token rows are not unpacked: the products are summed in another order, and
    compared with float64 they are as exact."""
    monkeypatch.setattr(unpacking, "_BUFFER", {"cpu": 1 << 15})  # one or two experts at once
    pair, mode = pairs[name], list(MODES)[list(CASES).index(name) % len(MODES)]
    made, states = [], []
    for packed in (True, False):
        model = load(pair.packed, mode=mode, train=False, packed=packed)
        engine = model.overspill
        plain_bytes = engine.shape.numel * 4
        assert (engine.layout.format is not None) == packed
        if packed:
            assert engine.layout.format.nbytes < plain_bytes / 3
        batch = make_batch(pair.family, model)
        made.append(outputs(model, batch))
        states.append({key: value + 0 for key, value in model.state_dict().items()})
        if packed:
            overspill.save(model, tmp_path / "saved")
        engine.check_conserved()
        engine.close()
    exact = outputs(again(pair.family, pair.plain).double(), batch)
    packed_error, plain_error = (each.double() - exact for each in made)
    assert packed_error.norm() <= 1.25 * plain_error.norm()
    assert packed_error.abs().max() <= 2 * plain_error.abs().max()
    assert plain_error.abs().max() <= 2e-6 * exact.abs().max()
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())
    saved, plain = tensors(tmp_path / "saved"), tensors(pair.plain)
    assert all(torch.equal(saved[key], value) for key, value in plain.items())


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("mxfp4", "host"),
        ("fp8-block", "gpu"),
        pytest.param("nvfp4", "gpu", marks=pytest.mark.slow),
        pytest.param("awq", "host", marks=pytest.mark.slow),
    ],
)
def test_experts_with_few_token_rows_are_not_unpacked(
    name: str, mode: str, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    tokens = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
    for packed in (False, True):
        model = load(pairs[name].packed, mode=mode, train=False, packed=packed)
        with monkeypatch.context() as patch:
            patch.setattr(RecordFormat, "unpack", Mock(side_effect=AssertionError("unpacked")))
            with torch.inference_mode():
                made.append(model(tokens, use_cache=False).logits)
        model.overspill.close()
    torch.testing.assert_close(made[1], made[0], rtol=1e-4, atol=1e-5)


def test_bytes_count_as_they_are_stored(pairs: Pairs, tmp_path: Path) -> None:
    sizes = []
    for packed in (True, False):
        model = load(pairs["mxfp4"].packed, mode="disk", train=False, packed=packed)
        sizes.append(model.overspill.bytes_by_tier()["disk"])
        record = model.overspill.layout.weight_bytes
        assert sizes[-1] % record == 0
        model.overspill.close()
    assert sizes[0] < sizes[1] / 3


def test_answers_are_those_of_unpacked_experts(pairs: Pairs) -> None:
    asked = overspill.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    tokens = []
    for packed in (True, False):
        given = {"dtype": "float32", "device": "cpu", "slots": 3, "packed": packed}
        with overspill.LLM(pairs["mxfp4"].packed, **given) as llm:
            made = llm.generate([[3, 4, 5], [9, 8]], asked)
            tokens.append([each.token_ids for each in made])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("mode", ["host", "disk"])
def test_adapters_of_packed_experts_are_trained(mode: str, pairs: Pairs, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pair = pairs["nvfp4"]
    losses, trained = [], []
    for packed in (True, False):
        model = load(pair.packed, mode=mode, packed=packed, freeze_experts=True)
        batch = make_batch(pair.family, model)
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config).train()
        parameters = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = overspill.AdamW(parameters, lr=0.01, eps=1e-4)
        for _ in range(3):
            loss = adapted(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        trained.append([p.detach().clone() for p in parameters])
        if packed:
            with pytest.raises(ConfigError, match="are packed, and cannot be changed"):
                adapted.merge_adapter()
            with pytest.raises(ConfigError, match="are packed, and cannot be changed"):
                model.load_state_dict(model.state_dict())
        model.overspill.close()
    assert losses[2] < losses[0]
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-6)
    for mine, theirs in zip(*trained, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("offload", slow_rows([False, True], 0))
def test_adapters_of_packed_experts_are_trained_in_stages(offload: bool, pairs: Pairs) -> None:
    """With the bits of micro-batches one after another; what passes may be in host memory."""
    peft = pytest.importorskip("peft")
    pair, found = pairs["nvfp4"], []
    config = peft.LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    for n_stages in (None, 2):
        model = load(pair.packed, mode="host", packed=True, freeze_experts=True)
        batch = make_batch(pair.family, model)
        batches = [batch, {name: value[1:] for name, value in batch.items()}]
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, config).train()
        optimizer = overspill.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
        parked = {"offload_activations": offload, "small_activation": 0}
        stages = n_stages and overspill.Stages(adapted, n_stages, **parked)  # type: ignore[arg-type]
        for _ in range(2):
            if stages:
                stages.backward(batches, optimizer)
            for each in () if stages else batches:
                (adapted(**each).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = {n: p.detach().clone() for n, p in adapted.named_parameters() if p.requires_grad}
        found.append(trained)
        model.overspill.check_conserved()
        model.overspill.close()
    assert found[0].keys() == found[1].keys() != set()
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


def test_experts_move_between_host_and_device(pairs: Pairs) -> None:
    model = load(pairs["int4-asymmetric"].packed, mode="host", train=False, packed=True)
    engine, batch = model.overspill, make_batch(pairs["int4-asymmetric"].family, model)
    expected = outputs(model, batch)
    for residents in ([2, 1], [4, 4], [0, 3]):
        engine.set_residents(residents)
        assert engine.residents == residents
        torch.testing.assert_close(outputs(model, batch), expected, rtol=1e-5, atol=1e-6)
    engine.swap_experts([Swap(1, 0, 3)])
    torch.testing.assert_close(outputs(model, batch), expected, rtol=1e-5, atol=1e-6)
    engine.check_conserved()
    engine.close()


@pytest.mark.parametrize(
    ("given", "packed"),
    [
        ({"train": False}, True),
        ({"freeze_experts": True}, True),
        ({}, False),
        ({"train": False, "packed": False}, False),
    ],
)
def test_experts_stay_packed_unless_they_are_trained(
    given: dict[str, bool], packed: bool, pairs: Pairs, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(pairs["mxfp4"].packed, **given)
    assert (model.overspill.layout.format is not None) == packed
    model.overspill.close()
    plain = load(pairs["mxfp4"].plain, **given)
    assert plain.overspill.layout.format is None
    plain.overspill.close()
    assert "unpacked" not in caplog.text


def test_what_cannot_stay_packed_is_refused_or_unpacked_with_a_notice(
    pairs: Pairs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pairs["int4"].packed
    given = {"packed": True, "device": "cpu", "quiet": True, "progress": False}
    with pytest.raises(ConfigError, match=r"packed=True .* cannot be trained; give freeze_exp"):
        overspill.load(folder, **given)
    with pytest.raises(ConfigError, match=r"plain has no packed experts.* without packed=True"):
        overspill.load(pairs["int4"].plain, train=False, **given)
    mixed = tmp_path / "mixed"
    shutil.copytree(folder, mixed)
    stored, plain = (
        load_file(mixed / "model.safetensors"),
        load_file(pairs["int4"].plain / "model.safetensors"),
    )
    w1 = "model.layers.1.block_sparse_moe.experts.2.w1."
    kept = {name: part for name, part in stored.items() if not name.startswith(w1)}
    save_file(kept | {f"{w1}weight": plain[f"{w1}weight"]}, mixed / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"packs {w1}weight in another way than .*layers\.1\."):
        overspill.load(mixed, train=False, **given)
    assert "unpacked" not in caplog.text
    loaded = load(mixed, train=False)
    assert f"experts are unpacked while they are read: {mixed} packs {w1}weight" in caplog.text
    assert loaded.overspill.layout.format is None
    assert torch.equal(loaded.state_dict()["lm_head.weight"], plain["lm_head.weight"])
    loaded.overspill.close()


def test_an_adapter_of_experts_needs_unpacked_ones(pairs: Pairs, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pair = pairs["awq"]
    plain = again(pair.family, pair.plain)
    batch = make_batch(pair.family, plain)
    config = peft.LoraConfig(
        r=2, target_parameters=["experts.down_proj"], init_lora_weights=False, target_modules=[]
    )
    adapted = peft.get_peft_model(plain, config)
    adapted.save_pretrained(tmp_path / "adapter")
    given = {"train": False, "adapter": tmp_path / "adapter"}
    with pytest.raises(
        ConfigError, match=r"changes experts .*cannot stay packed .*; load it without"
    ):
        load(pair.packed, packed=True, **given)
    model = load(pair.packed, **given)
    torch.testing.assert_close(outputs(model, batch), outputs(adapted, batch), rtol=1e-4, atol=1e-5)
    model.overspill.close()
