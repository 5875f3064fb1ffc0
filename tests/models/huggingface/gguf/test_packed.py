"""Experts of a GGUF file that stay packed compute what unpacked ones do."""

from pathlib import Path

import pytest
import torch

import overspill
from overspill.compute.record_format import MixedFormat
from overspill.core.errors import ConfigError
from overspill.moe import unpacking
from overspill.plan.usage import Swap
from tests.models.huggingface.families import make_batch
from tests.models.huggingface.gguf.cases import CASES, load, make_case
from tests.models.huggingface.oracle import MODES
from tests.models.huggingface.test_load import outputs
from tests.slow import slow_names

REFUSED = {
    "gpt-oss-mixed": r"ffn_gate_exps\.weight has type BF16 and Q8_0, which cannot stay packed",
    "deepseek-v2": r"ffn_down_exps\.weight has type Q5_1, which cannot stay packed",
    "olmoe": r"has no packed experts in layer 0, .*without packed=True",
}
SLOW = "glm4moe", "minimax-m2", "gpt-oss-q8"  # read like others
BITS = {"Q8_0": 8.5, "Q4_0": 4.5, "IQ4_NL": 4.5, "MXFP4": 4.25, "F16": 16} | {
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
}


@pytest.mark.parametrize("name", slow_names([name for name in CASES if name not in REFUSED], *SLOW))
def test_packed_experts_are_the_unpacked_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(unpacking._BUFFER, "cpu", 1 << 15)  # one or two experts at once
    path, mode = tmp_path / "model.gguf", list(MODES)[list(CASES).index(name) % len(MODES)]
    family, eager = make_case(CASES[name], path)
    batch = make_batch(family, eager)
    model = load(path, mode, packed=True)
    engine = model.overspill
    gate, up, down = (BITS[kind] for kind in CASES[name].experts)
    bits = (up + up if CASES[name].fused else gate + up) + down
    weights = engine.shape.d_model * engine.shape.d_hidden
    spare = 4 * 64 * len(engine.layout.format.of_layer(0).pieces) + 16 * engine.shape.in_rows
    assert 0 <= engine.layout.format.nbytes - weights * bits / 8 <= spare
    torch.testing.assert_close(outputs(model, batch), outputs(eager, batch), rtol=1e-4, atol=1e-5)
    state = model.state_dict()
    for key, value in eager.state_dict().items():
        assert torch.equal(state[key] + 0, value), key
    engine.check_conserved()
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_types_may_differ_by_layer(mode: str, tmp_path: Path) -> None:
    """As in files of llama.cpp, which give some layers more bits. Records have the largest size."""

    def choose(name: str, shape: tuple[int, ...]) -> str:
        if len(shape) == 1 or "inp" in name or "exps" not in name:
            return "F32"
        return ("Q8_0" if "down" in name else "Q4_0") if "blk.1." in name else "IQ4_NL"

    path = tmp_path / "model.gguf"
    family, eager = make_case(CASES["mixtral"], path, choose)
    batch = make_batch(family, eager)
    expected = outputs(eager, batch)
    model = load(path, mode, packed=True)
    engine = model.overspill
    assert isinstance(engine.layout.format, MixedFormat)
    small, large = (format.nbytes for format in engine.layout.format.layers)
    assert small < large == engine.layout.format.nbytes
    torch.testing.assert_close(outputs(model, batch), expected, rtol=1e-4, atol=1e-5)
    if mode == "host":
        for residents in ([2, 1], [4, 4], [0, 3]):
            engine.set_residents(residents)
            torch.testing.assert_close(outputs(model, batch), expected, rtol=1e-4, atol=1e-5)
        engine.swap_experts([Swap(1, 0, 3)])
        torch.testing.assert_close(outputs(model, batch), expected, rtol=1e-4, atol=1e-5)
    state = model.state_dict()
    assert all(torch.equal(state[key] + 0, value) for key, value in eager.state_dict().items())
    engine.check_conserved()
    engine.close()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_stay_packed_is_refused(name: str, tmp_path: Path) -> None:
    make_case(CASES[name], tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=REFUSED[name]):
        load(tmp_path / "model.gguf", packed=True)


def test_answers_are_those_of_unpacked_experts(tmp_path: Path) -> None:
    make_case(CASES["qwen3moe-k"], tmp_path / "model.gguf")
    asked = overspill.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    tokens = []
    for packed in (True, False):
        given = {"dtype": "float32", "device": "cpu", "slots": 2, "packed": packed}
        with overspill.LLM(tmp_path / "model.gguf", **given) as llm:
            tokens.append([made.token_ids for made in llm.generate([[3, 4, 5], [9]], asked)])
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3moe", "qwen3moe-k", "mixtral", "gpt-oss"])
def test_a_gpu_computes_packed_experts(name: str, tmp_path: Path) -> None:
    """Also those that only torch unpacks."""
    family, eager = make_case(CASES[name], tmp_path / "model.gguf")
    batch = make_batch(family, eager)
    expected = outputs(eager, batch)
    model = load(tmp_path / "model.gguf", packed=True, device="cuda")
    found = outputs(model, {key: value.cuda() for key, value in batch.items()})
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    model.overspill.close()
