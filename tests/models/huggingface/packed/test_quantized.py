"""Plain checkpoints whose experts are packed while they are read."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.compute.packed_matrix import PackedMatrix
from overspill.compute.quantize import quantize
from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.experts import ExpertId
from overspill.core.packing import QUANTIZATIONS
from tests.models.huggingface.families import make_batch, make_model, tiny
from tests.models.huggingface.gguf.cases import CASES as CASES_OF_GGUF
from tests.models.huggingface.gguf.cases import load as load_gguf
from tests.models.huggingface.gguf.cases import make_case
from tests.models.huggingface.oracle import MODES
from tests.models.huggingface.packed.cases import Pairs, load
from tests.models.huggingface.test_exactness import BY_NAME
from tests.models.huggingface.test_load import again, outputs, tensors

# family, changes of its config, format: gates beside and between, transposed, biases, converted
# while reading, not gated, experts in dictionaries, partial blocks
CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("mixtral", {"intermediate_size": 64}, "int4"),
    ("qwen3_moe", {"moe_intermediate_size": 160, "hidden_size": 64}, "fp8"),
    ("gpt_oss", {"intermediate_size": 64}, "mxfp4"),
    ("gpt_oss", {"intermediate_size": 64}, "int4"),
    ("granitemoe", {"intermediate_size": 64}, "mxfp4"),
    ("nllb-moe", {}, "fp8"),
)


def make(name: str, fields: dict[str, Any]) -> Any:
    family = BY_NAME[name]
    return dataclasses.replace(family, build=partial(tiny, name, **fields)) if fields else family


def rounded(matrix: Tensor, name: str) -> Tensor:
    """The values of a packed matrix [N, K]."""
    out = torch.empty(matrix.shape)
    PackedMatrix(QUANTIZATIONS[name], *matrix.shape).unpack(
        quantize(matrix.float(), QUANTIZATIONS[name]), out
    )
    return out


def round_experts(model: Any, name: str) -> None:
    """Replaces the weights of experts by those of the format, in a model of transformers."""
    for key, parameter in model.named_parameters():
        if "expert" not in key or parameter.dim() < 2 or "bias" in key or "router" in key:
            continue
        transposed = model.config.model_type == "gpt_oss"
        stack = parameter.data if parameter.dim() == 3 else parameter.data[None]
        for matrix in stack:
            plain = matrix.T if transposed else matrix
            halves = 2 if "gate_up" in key and not transposed else 1
            made = [rounded(half, name) for half in plain.chunk(halves)]
            matrix.copy_(torch.cat(made).T if transposed else torch.cat(made))


@pytest.mark.parametrize(("family_name", "fields", "name"), CASES)
def test_experts_are_packed_while_they_are_read(
    family_name: str, fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    family = make(family_name, fields)
    make_model(family).save_pretrained(tmp_path / "plain")
    eager = again(family, tmp_path / "plain")
    round_experts(eager, name)
    mode = list(MODES)[len(family_name) % len(MODES)]
    model = load(tmp_path / "plain", mode=mode, train=False, quantize=name)
    engine, batch = model.overspill, make_batch(family, model)
    share = {"mxfp4": 4.25, "int4": 4.5, "fp8": 8}[name] / 32
    assert engine.layout.format.nbytes <= engine.shape.numel * 4 * share * 1.25
    state = model.state_dict()
    for key, value in eager.state_dict().items():
        assert torch.equal(state[key], value), key
    torch.testing.assert_close(outputs(model, batch), outputs(eager, batch), rtol=1e-4, atol=1e-5)
    overspill.save(model, tmp_path / "saved")
    engine.close()
    eager.save_pretrained(tmp_path / "expected")
    saved = tensors(tmp_path / "saved")
    for key, value in tensors(tmp_path / "expected").items():
        assert torch.equal(saved[key], value), key


def test_weights_are_rounded_once(tmp_path: Path) -> None:
    """The values of the checkpoint are packed, not their values after rounding to the model's
    type."""
    family = make("mixtral", {"intermediate_size": 64})
    make_model(family).save_pretrained(tmp_path)
    records = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load(tmp_path, dtype=dtype, train=False, quantize="mxfp4")
        record = torch.empty(model.overspill.shape.numel, dtype=dtype)
        model.overspill.records.read_weights(ExpertId(1, 2), record)
        records.append(record)
        model.overspill.close()
    assert torch.equal(records[0].bfloat16(), records[1])


def test_an_adapter_is_added_before_experts_are_packed(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    family = make("mixtral", {"intermediate_size": 64})
    make_model(family).save_pretrained(tmp_path / "plain")
    config = peft.LoraConfig(
        r=2, target_parameters=["experts.down_proj"], init_lora_weights=False, target_modules=[]
    )
    adapted = peft.get_peft_model(again(family, tmp_path / "plain"), config)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    round_experts(merged, "int4")
    given = {"train": False, "quantize": "int4", "adapter": tmp_path / "adapter"}
    model = load(tmp_path / "plain", **given)
    batch = make_batch(family, model)
    # a sum in another order may round a weight to the next code
    torch.testing.assert_close(outputs(model, batch), outputs(merged, batch), rtol=0.05, atol=0.01)
    model.overspill.close()


def test_what_cannot_be_packed_is_refused(pairs: Pairs, tmp_path: Path) -> None:
    plain = pairs["int4"].plain
    given = {"device": "cpu", "quiet": True, "progress": False, "quantize": "int4"}
    with pytest.raises(ConfigError, match=r"quantize='int4' .* cannot be trained; give freeze_exp"):
        overspill.load(plain, **given)
    given["train"] = False
    with pytest.raises(ConfigError, match=r"--packed is for quantized checkpoints, --quantize for"):
        load(tmp_path, train=False, packed=True, quantize="int4")
    with pytest.raises(ConfigError, match=r"quantize='int3' is unknown; give one of mxfp4, int4"):
        overspill.load(plain, **given | {"quantize": "int3"})
    with pytest.raises(ConfigError, match=r"quantize='int4' .*is quantized already \(model"):
        overspill.load(pairs["mxfp4"].packed, **given)
    narrow = make("mixtral", {"intermediate_size": 48})
    make_model(narrow).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ConfigError, match=r"groups of 32 weights, and rows of .*down_proj have 48"):
        overspill.load(tmp_path / "narrow", **given)
    wide = make_model(make("mixtral", {"intermediate_size": 64})).double()
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match=r"is float64 in .*; only weights in bf16, fp16 and fp32"):
        overspill.load(tmp_path / "wide", dtype=torch.float32, **given)
    broken = make_model(make("mixtral", {"intermediate_size": 64}))
    broken.model.layers[1].mlp.experts.down_proj.data[2, 3, 4] = torch.nan
    broken.save_pretrained(tmp_path / "broken")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj has weights th"):
        overspill.load(tmp_path / "broken", **given)


def test_only_experts_have_to_be_plain(tmp_path: Path) -> None:
    """A GGUF file may hold experts in bf16, fp16 and fp32 beside packed dense weights."""
    _, plain = make_case(CASES_OF_GGUF["olmoe"], tmp_path / "model.gguf")
    round_experts(plain, "mxfp4")
    model = load_gguf(tmp_path / "model.gguf", quantize="mxfp4")
    state = model.state_dict()
    for key, value in plain.state_dict().items():
        assert torch.equal(state[key], value), key
    model.overspill.close()


def test_answers_of_a_model_that_is_packed(tmp_path: Path) -> None:
    family = make("gpt_oss", {"intermediate_size": 64})
    make_model(family).save_pretrained(tmp_path / "plain")
    eager = again(family, tmp_path / "plain")
    round_experts(eager, "mxfp4")
    eager.save_pretrained(tmp_path / "rounded")
    asked = overspill.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    tokens = []
    for folder, name in (("plain", "mxfp4"), ("rounded", None)):
        given: dict[str, Any] = {"dtype": "float32", "device": "cpu", "slots": 3}
        with overspill.LLM(tmp_path / folder, quantize=name, **given) as llm:
            made = llm.generate([[3, 4, 5], [9, 8]], asked)
            tokens.append([each.token_ids for each in made])
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_gpu_gets_the_records_of_the_cpu(name: str, tmp_path: Path) -> None:
    family = make("mixtral", {"intermediate_size": 64})
    make_model(family).save_pretrained(tmp_path)
    states, made = [], []
    for device in ("cpu", "cuda"):
        model = overspill.load(
            tmp_path, dtype=torch.float32, device=device, mode="host", slots=3, train=False,
            quantize=name, quiet=True, progress=False,
        )  # fmt: skip
        batch = {key: value.to(device) for key, value in make_batch(family, model).items()}
        made.append(outputs(model, batch).cpu())
        states.append({key: value.cpu() for key, value in model.state_dict().items()})
        model.overspill.close()
    assert all(torch.equal(states[1][key], value) for key, value in states[0].items())
    torch.testing.assert_close(made[1], made[0], rtol=1e-3, atol=1e-4)
