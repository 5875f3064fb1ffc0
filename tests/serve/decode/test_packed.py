"""Fused steps with packed experts, wherever they are, give the logits of the plain model."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.compute.decode import constants
from tests.models.huggingface.gguf import cases as gguf
from tests.models.huggingface.packed.cases import Pairs, load
from tests.models.huggingface.test_load import again
from tests.serve.decode.decoding import INTERPRETED, Decoding
from tests.serve.models import PROMPTS

pytestmark = INTERPRETED


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("packed"))


def decode(
    pairs: Pairs, name: str, residents: Sequence[int], slots: int, prompts: Sequence[list[int]],
    mode: str = "auto", migrate: str = "auto",
) -> Decoding:  # fmt: skip
    pair = pairs[name]
    plain = again(pair.family, pair.plain).eval()
    model = load(pair.packed, mode="host", train=False, packed=True)
    model.overspill.set_residents(residents)
    made = Decoding(plain, model, prompts, slots, mode, migrate=migrate)
    try:
        for _ in range(2):
            made.step()
        stats = made.runner.stats()
    finally:
        made.runner.close()
    model.overspill.check_conserved()
    model.overspill.close()
    assert not slots or sum(stats["expert_hit_rate"]) > 0
    return made


@pytest.mark.parametrize(
    ("name", "residents", "slots"),
    [
        ("mxfp4", [1, 0], 3),
        ("fp8-block", [0, 0], 0),
        pytest.param("awq", [4, 4], 0, marks=pytest.mark.slow),
        pytest.param("nvfp4-compressed", [1, 2], 2, marks=pytest.mark.slow),
        pytest.param("gptq", [1, 2], 2, marks=pytest.mark.slow),
        pytest.param("fp8-tensor", [1, 2], 2, marks=pytest.mark.slow),
    ],
)
def test_packed_experts_are_decoded(
    name: str, residents: list[int], slots: int, pairs: Pairs, steps: list[int]
) -> None:
    decode(pairs, name, residents, slots, PROMPTS[:1])
    assert steps == [1, 1]


def test_several_requests_read_packed_experts_once(
    pairs: Pairs, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "SEVERAL", 1)
    decode(pairs, "fp8-block", [1, 0], 0, PROMPTS[:3])
    assert steps == [4, 4]


def test_packed_experts_are_copied_ahead(pairs: Pairs, steps: list[int]) -> None:
    decode(pairs, "mxfp4", [1, 0], 0, PROMPTS[:1], mode="prefetch-all")
    assert steps == [1, 1]


@pytest.mark.parametrize(
    ("name", "prompts"),
    [
        ("mxfp4", PROMPTS[:1]),
        pytest.param("awq", PROMPTS[:2], marks=pytest.mark.slow),
        pytest.param("fp8-block", PROMPTS[:2], marks=pytest.mark.slow),
        pytest.param("nvfp4", PROMPTS[:2], marks=pytest.mark.slow),
    ],
)
def test_the_cpu_computes_packed_experts(
    name: str, prompts: Sequence[list[int]], pairs: Pairs, steps: list[int]
) -> None:
    made = decode(pairs, name, [1, 0], 0, prompts, migrate="cpu")
    assert made.runner.stats()["experts_on_cpu"] > 0
    assert steps == [len(prompts)] * 2


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_types_of_gguf_may_differ_by_layer(
    several: bool, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files such as Q4_K_M give some layers more bits than others."""

    def choose(name: str, shape: tuple[int, ...]) -> str:
        if "exps" not in name:
            return "F32"
        return "IQ4_NL" if "blk.0." in name else "Q6_K" if "down" in name else "Q4_K"

    monkeypatch.setattr(constants, "SEVERAL", 1 if several else 100)
    for tile in ("PACKED_IN_TILE", "PACKED_OUT_TILE", "PACKED_WIDE_TILE"):
        monkeypatch.setattr(constants, tile, constants.Tile(128, 16, 4))
    case = gguf.CASES["qwen3moe-k"]
    case = dataclasses.replace(case, config=case.config | {"num_hidden_layers": 2})
    _, eager = gguf.make_case(case, tmp_path / "model.gguf", choose)
    model = gguf.load(tmp_path / "model.gguf", packed=True)
    model.overspill.set_residents([1, 0])
    made = Decoding(eager, model, PROMPTS[:1], 1)
    made.step()
    made.runner.close()
    model.overspill.check_conserved()
    model.overspill.close()
    assert steps == [1]


@pytest.mark.parametrize(
    ("options", "residents"),
    [
        ({"slots": 3}, [1, 0]),
        ({"slots": 1}, [0, 0]),
        ({"mode": "prefetch-all"}, [0, 1]),
        ({"migrate": "cpu", "slots": 3}, [0, 1]),
    ],
    ids=["cache", "one-slot", "copies", "cpu"],
)
def test_records_may_differ_in_size_by_layer(
    options: dict[str, Any], residents: list[int], tmp_path: Path, steps: list[int]
) -> None:
    _, eager = gguf.make_case(gguf.CASES["mixtral"], tmp_path / "model.gguf", gguf.mixed)
    model = gguf.load(tmp_path / "model.gguf", packed=True)
    engine = model.overspill
    assert engine.layout.weight_bytes_in(0) < engine.layout.weight_bytes_in(1)
    engine.set_residents(residents)
    made = Decoding(eager, model, PROMPTS[:1], **options)
    for _ in range(4):
        made.step()
    stats = made.runner.stats()
    assert stats["expert_slots"] == options.get("slots", 0)
    assert options.get("slots", 0) < 2 or min(stats["expert_hit_rate"]) > 0
    made.runner.close()
    engine.check_conserved()
    engine.close()
    assert steps == [1] * 4


def test_records_on_disk_may_differ_in_size_by_layer(tmp_path: Path, steps: list[int]) -> None:
    _, eager = gguf.make_case(gguf.CASES["mixtral"], tmp_path / "model.gguf", gguf.mixed)
    given = {"mode": "disk", "slots": 3, "host_slots": 6, "disk": tmp_path, "device": "cpu"}
    model = overspill.load(
        tmp_path / "model.gguf", dtype=torch.float32, train=False, packed=True, quiet=True,
        progress=False, **given,
    )  # fmt: skip
    engine = model.overspill
    small, large = (engine.layout.weight_bytes_in(layer) for layer in (0, 1))
    assert engine.bytes_by_tier()["disk"] == 4 * (small + large)
    made = Decoding(eager, model, PROMPTS[:1])
    engine.flush()  # reads of the prompt
    before = engine.recorder.counters()["ssd read"]
    for _ in range(4):
        made.step()
    read = engine.recorder.counters()["ssd read"] - before
    assert read % small == 0
    assert 0 < read <= 4 * 2 * (small + large), "two experts of each layer for every token"
    made.runner.close()
    engine.close()
    assert steps == [1] * 4


def test_packed_experts_are_read_from_disk(pairs: Pairs, tmp_path: Path, steps: list[int]) -> None:
    pair = pairs["mxfp4"]
    plain = again(pair.family, pair.plain).eval()
    given = {"mode": "disk", "slots": 3, "host_slots": 6, "disk": tmp_path, "device": "cpu"}
    others = {"dtype": torch.float32, "train": False, "packed": True, "quiet": True}
    model = overspill.load(pair.packed, progress=False, **given, **others)
    assert model.overspill.bytes_by_tier()["disk"] > 0
    made = Decoding(plain, model, PROMPTS[:1])
    for _ in range(2):
        made.step()
    made.runner.close()
    model.overspill.close()
    assert steps == [1, 1]
