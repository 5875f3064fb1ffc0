"""Benchmarks of gpt-oss-120b's shape write their records, and follow recorded routing."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

RECORDED_LAYERS, EXPERTS = 2, 4


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """500 tokens, each with two of four experts; the first ones are chosen most."""
    rng, shape = np.random.default_rng(0), (500, RECORDED_LAYERS, EXPERTS)
    chosen = (rng.random(shape) * (1 + np.arange(EXPERTS))).argsort(-1)[..., :2]
    path = tmp_path / "routing.npz"
    np.savez(path, experts=chosen.astype(np.uint8), offsets=[0, len(chosen)])
    return path


@pytest.mark.usefixtures("scripts")
def test_each_group_of_experts_is_as_popular_as_in_the_recording(recording: Path) -> None:
    trace = importlib.import_module("packed_models").wide_routing(recording, 3, 2 * EXPERTS, 2)
    ids_LTK = trace.all_layers(500, torch.device("cpu")).long()
    assert ids_LTK.shape == (3, 500, 2)
    assert (ids_LTK // EXPERTS == torch.tensor([0, 1])).all()  # one expert of each group
    recorded_TLK = np.load(recording)["experts"]
    for layer in range(3):
        original = np.bincount(recorded_TLK[:, layer % RECORDED_LAYERS].ravel()) / 2
        for group in range(2):
            own = np.bincount(ids_LTK[layer, :, group] - EXPERTS * group)
            assert np.abs(own - original).max() < 40
    assert not torch.equal(ids_LTK[0, :, 0], ids_LTK[0, :, 1] - EXPERTS)  # another part each
    assert not torch.equal(ids_LTK[0], ids_LTK[2])


def run(script: str, *arguments: str) -> None:
    importlib.import_module(script).main([*arguments, "--smoke"])


def read(folder: Path, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert next(iter(record["metrics"].values()))["median"] > 0
    return record


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("part", "record"),
    [
        ("host", "serve-gpt-oss-120b"),
        pytest.param("disk", "serve-gpt-oss-120b-ssd", marks=pytest.mark.slow),
    ],
)
def test_each_part_writes_a_record(part: str, record: str, recording: Path, tmp_path: Path) -> None:
    given = "--routing", str(recording), "--disk", str(tmp_path), "--out", str(tmp_path)
    run("serve_gpt_oss", part, *given)
    written = read(tmp_path, record)
    assert {"share", "hit_rate"} < set(written["metrics"])
    assert "gpt-oss-20b" in written["config"]["routing"]


@pytest.mark.usefixtures("scripts")
def test_a_checkpoint_is_made_and_loaded_packed(tmp_path: Path) -> None:
    run("load", "--gpt-oss", "--folder", str(tmp_path), "--out", str(tmp_path))
    written = read(tmp_path, "load-gpt-oss-120b")
    assert {"disk", "pinning", "beyond_the_store"} < set(written["metrics"])
    assert not (tmp_path / "checkpoint").exists()
