"""The benchmarks of served encoder-decoders: each writes a record, from which tables and pictures
are made."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.bench.conftest import BENCH

FAST = ["modes", "cache", "nllb-ssd"]
SLOW = ["active", "large", "large-ssd", "nllb"]
RECORDS = {
    "modes": "switch-modes-64", "active": "switch-active", "cache": "switch-cache",
    "large": "switch-large", "large-ssd": "switch-large-ssd", "nllb": "serve-nllb",
    "nllb-ssd": "serve-nllb-ssd",
}  # fmt: skip


def run_parts(parts: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """The records of their smoke test."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCH), *sys.path])
        common = ["--smoke", "--out", str(folder), "--disk", str(folder / "disk")]
        importlib.import_module("switch").main([*parts, *common, "--sizes", "64"])
        for name in set(sys.modules) - before:
            if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    return {
        part: json.loads((folder / f"{RECORDS[part]}.json").read_text()) for part in parts
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("switch")


@pytest.fixture(scope="module")
def smoke(folder: Path) -> dict[str, dict[str, Any]]:
    return run_parts(FAST, folder)


@pytest.fixture
def models(scripts: None) -> ModuleType:
    return importlib.import_module("switch_models")


def check(record: dict[str, Any]) -> None:
    assert len({tuple(row) for row in record["table"]}) == 1  # all rows have the same columns
    for name, each in record["metrics"].items():
        # without a GPU there is no GPU memory
        assert each["median"] > 0 or each["unit"] in ("%", "GiB"), name


@pytest.mark.parametrize("part", FAST)
def test_each_part_writes_a_record(part: str, smoke: dict[str, dict[str, Any]]) -> None:
    check(smoke[part])


@pytest.mark.slow
def test_the_other_parts_write_records(tmp_path: Path) -> None:
    for record in run_parts(SLOW, tmp_path).values():
        check(record)


def test_every_part_takes_less_than_ten_minutes(
    scripts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    switch = importlib.import_module("switch")
    switch.main([*switch.PLANS, "--estimate", "--disk", str(tmp_path)])
    totals = re.findall(r"(\S+): (\d+) s in all", capsys.readouterr().out)
    assert [part for part, _ in totals] == [*switch.PLANS]
    assert all(int(seconds) < 600 for _, seconds in totals)
    with pytest.raises(SystemExit):
        switch.main(["large-ssd"])  # without --disk


def test_records_of_modes_say_what_they_are_divided_by(smoke: dict[str, dict[str, Any]]) -> None:
    record = smoke["modes"]
    assert [row["mode"] for row in record["table"]] == [
        "gpu-only", "on-demand", "prefetch-all", "pre-gated, copied", "pre-gated",
    ]  # fmt: skip
    assert next(iter(record["metrics"])) == "gpu_only"
    assert "weights of a token" in record["limit"]["source"]
    for mode in ("pre_gated", "pre_gated_copied"):
        assert {f"{mode}_over_on_demand", f"{mode}_over_prefetch_all"} <= set(record["metrics"])
        assert f"{mode}_beyond_equation_1" in record["metrics"]


def test_tables_show_the_figures_of_a_record_above_its_rows(
    smoke: dict[str, dict[str, Any]],
) -> None:
    from bench.tables import fill

    text = "<!-- bench:switch-modes start -->\n<!-- bench:switch-modes end -->\n"
    filled = fill(text, [smoke["modes"]])
    assert "| work | figure (low–high) | other figures | limit, and share of it |" in filled
    assert "pre gated over on demand " in filled
    limits = fill(text.replace("switch-modes", "limits"), [smoke["nllb-ssd"]])
    assert "| on-demand |" in limits
    assert filled.index("| work |") < filled.index("| model | mode | tokens/s |")


def test_pictures_are_drawn_of_the_records_that_exist(
    smoke: dict[str, dict[str, Any]], folder: Path, scripts: None
) -> None:
    pytest.importorskip("matplotlib")
    plot = importlib.import_module("pregate_plot")
    plot.main(["--results", str(folder), "--out", str(folder)])
    names = {path.stem for path in folder.glob("*.png")}
    assert names == {"switch-modes", "switch-cache", "switch-ssd"}
    with pytest.raises(SystemExit):
        plot.main(["switch-mode"])


def test_shapes_are_those_of_the_papers_models(models: ModuleType) -> None:
    large = models.Shape("switch-large-128")
    assert large.expert_bytes == 2 * 2 * 1024 * 4096
    assert large.n_experts * large.expert_bytes == 48 * 2**30
    nllb = models.Shape("nllb-moe-54b")
    smaller = nllb.within(54 * 2**30, nllb.blocks)
    assert (smaller.layers, smaller.blocks) == (12, 3)
    assert smaller.n_experts * smaller.expert_bytes <= 54 * 2**30
    assert nllb.within(120 * 2**30, nllb.blocks) is nllb
    assert nllb.within(120 * 2**30, 4).blocks == 4
    assert "12 of 24 blocks" in str(smaller)


def test_a_token_reads_the_decoder_with_its_experts(models: ModuleType) -> None:
    """Counted by hand for the tiny model of d 32, with two of four blocks that have experts."""
    shape = models.Shape("switch-base-64", tiny=True)
    model = models.build(shape)
    dense, experts = models.token_bytes(model, shape.top_k)
    everything = models.dense_bytes(model)
    equation = models.equation_1(model, shape.top_k)
    model.overspill.close()
    d, heads, buckets, vocab, n_experts = 32, 2, 32, 256, 8
    blocks = 4 * (4 + 2) * d * d + 2 * 2 * d * d
    routers = 4 * 2 * n_experts * d  # float32
    norms = (3 * 4 + 1) * d
    assert dense == 2 * (blocks + norms + buckets * heads + vocab * d) + routers
    assert experts == 2 * 2 * 2 * d * d
    assert everything == shape.dense_bytes
    assert equation == everything + 2 * 2 * 2 * d * d


class _Engine:
    n_layers, n_experts = 4, 64


def test_routing_of_requests_and_recordings(
    models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests at once have different experts; recorded ones are distinct for a token and fill the
    whole range; steps go on after each other, whatever prompts take."""
    model = type("Model", (), {"overspill": _Engine})
    monkeypatch.setattr(models, "decoder_blocks", lambda _: 2)
    cpu = torch.device("cpu")
    source = models.in_turn(model)
    assert source.all_layers(64, cpu)[3].flatten().unique().numel() == 64
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(32), (50, 4, 1)), axis=2)
    np.savez(tmp_path / "r.npz", experts=experts[:, :, :4].astype(np.uint8))
    source = models.recorded(tmp_path / "r.npz", model, 2)
    first = source.all_layers(1, cpu)
    source(0, 7, cpu)
    steps = torch.cat([first, source.all_layers(49, cpu)], dim=1)
    assert steps.shape == (4, 50, 2)
    assert torch.equal(steps[0], steps[2])
    assert (steps[..., 0] != steps[..., 1]).all()
    pairs = experts[:, 0, :2] + 32 * (experts[:, 1, :2] % 2)
    assert np.array_equal(steps[2].numpy(), pairs)
    with pytest.raises(SystemExit, match="do not make"):
        models.recorded(tmp_path / "r.npz", model, 5)
    counts = models.drawn(model, 1, 1.0).all_layers(4096, cpu)[0].flatten().bincount(minlength=64)
    assert counts.max() > 5 * 4096 / 64
