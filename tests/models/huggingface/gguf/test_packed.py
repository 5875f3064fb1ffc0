"""Experts of a GGUF file that stay packed compute what unpacked ones do."""

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.compute.record_format import MixedFormat
from overspill.core.errors import ConfigError
from overspill.moe import unpacking
from overspill.plan.usage import Swap
from tests.models.huggingface.families import make_batch
from tests.models.huggingface.gguf.cases import CASES, load, make_case, mixed
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
    path = tmp_path / "model.gguf"
    family, eager = make_case(CASES["mixtral"], path, mixed)
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


@pytest.mark.parametrize("mode", MODES)
def test_experts_take_the_bytes_of_their_layer(mode: str, tmp_path: Path) -> None:
    """In every memory, in uploads and in reads from disk; slots for any layer have the largest."""
    path, seen = tmp_path / "model.gguf", []
    family, eager = make_case(CASES["mixtral"], path, mixed)

    def progress(what: str, done: int, total: int) -> None:
        if "filling" in what:
            seen.append((done, total))

    model = load(path, mode, packed=True, progress=progress, dense_weights="gpu")
    engine = model.overspill
    assert isinstance(engine.layout.format, MixedFormat)
    rows = [format.nbytes for format in engine.layout.format.layers]
    sizes = [engine.layout.weight_bytes_in(layer) for layer in (0, 1)]
    assert sizes == [4096, 8192]
    assert seen[-1] == (4 * sum(sizes), 4 * sum(sizes))
    expected = {
        "gpu": {"gpu": 4 * sum(rows), "host": 0, "disk": 0},
        "host": {"gpu": 3 * sizes[1], "host": 4 * sum(sizes), "disk": 0},
        # an expert of each layer is resident
        "disk": {"gpu": sum(rows) + 2 * sizes[1], "host": 3 * sizes[1], "disk": 3 * sum(sizes)},
    }
    assert engine.bytes_by_tier() == expected[mode]
    engine.recorder.start()
    outputs(model, make_batch(family, eager))
    engine.flush()
    spans = [span for span in engine.recorder.spans() if span.row in ("upload", "ssd read")]
    assert len(spans) >= {"gpu": 0, "host": 8, "disk": 12}[mode]
    for span in spans:
        layer = int(span.name.split()[1].split(".")[0])
        assert span.bytes == sizes[layer]
    engine.close()


@pytest.mark.parametrize(
    "memory",
    [
        {"mode": "gpu"},
        {"mode": "host", "gpu_experts": 3},
        {"mode": "host", "slots": 2},
        {"mode": "disk", "slots": 2, "host_slots": 2},
        {"mode": "disk", "slots": 3, "host_slots": 7, "gpu_experts": 1},
    ],
    ids=lambda memory: "-".join(map(str, memory.values())),
)
def test_answers_do_not_depend_on_where_records_of_several_sizes_are(
    memory: dict[str, Any], tmp_path: Path
) -> None:
    make_case(CASES["mixtral"], tmp_path / "model.gguf", mixed)
    asked = overspill.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [[3, 4, 5, 6], [9, 1]]
    tokens = []
    for packed, given in ((False, {"mode": "gpu"}), (True, memory)):
        disk = {"disk": tmp_path / "spill"} if given["mode"] == "disk" else {}
        model = overspill.load(
            tmp_path / "model.gguf", dtype=torch.float32, device="cpu", train=False, quiet=True,
            progress=False, packed=packed, **given, **disk,
        )  # fmt: skip
        with overspill.LLM(model) as llm:
            tokens.append([made.token_ids for made in llm.generate(prompts, asked)])
        model.overspill.check_conserved()
        model.overspill.close()
    assert tokens[0] == tokens[1]


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
    # logits are up to 14, and those of the CPU 1.3e-5 from the ones in float64
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=3e-5)
    model.overspill.close()
