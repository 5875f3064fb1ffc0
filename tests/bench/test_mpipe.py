"""The benchmarks of the pipelined layer: what they compute from times, and that each runs."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from bench.loopback import LoopbackExchange
from overspill.core.errors import ConfigError
from overspill.trace.spans import Span
from tests.bench.conftest import BENCH

FIGURES = [f"figure-{number}" for number in range(8, 14)]
PARTS = ["overlap", "granularity", "memory", "strategy", "streamed", "figure-8", "timeline"]


@pytest.fixture
def mpipe(scripts: None) -> ModuleType:
    return importlib.import_module("mpipe")


def run_parts(out: Path, parts: list[str]) -> Path:
    """The folder of their smoke test."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCH), *sys.path])
        importlib.import_module("mpipe").main([*parts, "--smoke", "--out", str(out)])
        for name in set(sys.modules) - before:
            if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    return out


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_parts(tmp_path_factory.mktemp("mpipe"), PARTS)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_parts(tmp_path_factory.mktemp("figures"), [*FIGURES, "timeline", "draw"])


def read(smoke: Path, part: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((smoke / f"mpipe-{part}.json").read_text())
    return record


def check(record: dict[str, Any]) -> None:
    assert record["metrics"]
    if "table" in record:
        assert len({tuple(row) for row in record["table"]}) == 1  # all rows have the same columns
        assert len(record["table"]) > 1


@pytest.mark.parametrize("part", PARTS)
def test_each_part_writes_a_record(smoke: Path, part: str) -> None:
    check(read(smoke, part))


@pytest.mark.slow
@pytest.mark.parametrize("part", FIGURES)
def test_each_figure_has_a_record(figures: Path, part: str) -> None:
    check(read(figures, part))


@pytest.mark.slow
def test_each_figure_and_the_timeline_have_a_picture(figures: Path) -> None:
    pictures = [*(f"mpipe-{name}.png" for name in FIGURES), "timeline-moe-layer.png"]
    for name in pictures:
        assert (figures / name).read_bytes().startswith(b"\x89PNG"), name
    assert {read(figures, part)["config"]["picture"] for part in (*FIGURES, "timeline")} == {
        *pictures
    }


def test_speedups_are_ratios_of_the_times_beside_them(smoke: Path) -> None:
    for row in read(smoke, "figure-8")["table"]:
        expected = row["FastMoE-like, ms"] / row["PipeMoE, ms"]
        assert row["over FastMoE-like"] == pytest.approx(expected, rel=0.02)
        assert row["n"] in (1, 2, 4, 8)


@pytest.mark.slow
def test_reuse_saves_memory_also_of_tiny_layers(figures: Path) -> None:
    """Storages are counted on a CPU, so this figure is the same in each run."""
    rows = {row["n"]: row for row in read(figures, "figure-10")["table"] if row["tokens"] == 16}
    assert rows[8]["saved, %"] > rows[4]["saved, %"] > rows[2]["saved, %"] > 0


def test_the_timeline_has_all_stages_of_all_partitions_twice(smoke: Path) -> None:
    names = [text.split(", ")[1] for text in read(smoke, "timeline")["config"]["spans"]]
    for stage in "SCR":
        for number in range(4):
            assert names.count(f"{stage}{number}") == 2


def test_pictures_need_records(mpipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no record of a figure"):
        mpipe.main(["draw", "--out", str(tmp_path)])


def test_smoke_tests_do_not_replace_records(mpipe: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--smoke needs --out"):
        mpipe.main(["figure-8", "--smoke"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(mpipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="need a GPU; --smoke"):
        mpipe.main(["figure-8", "--out", str(tmp_path)])


@pytest.mark.parametrize("name", ["Synchronous", "PeerPieces"])
def test_baselines_compute_what_the_layer_does(scripts: None, name: str) -> None:
    exchange = LoopbackExchange("cpu")
    layer = overspill.MoELayer(8, 16, 1, 1, exchange=exchange, partitions=3, seed=1)
    baseline = getattr(importlib.import_module("mpipe_baselines"), name)(layer, exchange)
    x, dy = torch.randn(37, 8), torch.randn(37, 8)
    found = []
    for module in (layer, baseline):
        module.zero_grad()
        own = x.clone().requires_grad_()
        y, balance = module(own)
        (y * dy).sum().backward()
        found.append([y, balance, own.grad, layer.w_in.grad, layer.w_out.grad])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_the_overhead_of_a_search_is_what_its_steps_take_longer(scripts: None) -> None:
    module = importlib.import_module("mpipe_granularity")
    search = module.Search(1, [9.0, 5.0, 4.0, 4.0], [8.0, 4.0, 4.0, 4.0], 4.1)
    found = module.Granularity(1024, {1: 4.0, 2: 5.0}, [search])
    assert found.best == 1
    assert found.above(search) == pytest.approx(2.5)
    assert search.overhead == pytest.approx(100 * 2 / 410)


def test_a_bad_choice_shows_as_a_gain_below_one(scripts: None) -> None:
    kind = importlib.import_module("mpipe_overlap").Overlap
    found = kind(sending=10.0, computing=8.0, local=10.0, one=20.0, best=13.6, adaptive=25.0)
    assert found.gain == pytest.approx(0.8)
    assert found.hidden == pytest.approx(0.8)
    assert found.similar


def test_memory_is_compared_with_both_equations(scripts: None) -> None:
    layers = importlib.import_module("mpipe_layers")
    mib, spec = 2**20, layers.GPT_XL
    peaks = 1600 * mib, 1200 * mib, 960 * mib
    found = importlib.import_module("mpipe_memory").saving(spec, 16384, 4, peaks)
    # of T_DI and T_DO, 64 MiB each, half remains, of T_M, 256 MiB, a quarter; twice for gradients
    assert found.bytes_bound == 2 * (64 + 192) * mib
    assert found.of_equation_5 == pytest.approx(640 / 512)
    assert found.ratio_bound == pytest.approx(512 / 1280, rel=1e-3)  # 256 MiB of states
    assert found.of_equation_6 == pytest.approx(1.0, rel=1e-3)


def test_spans_have_the_labels_of_the_paper(scripts: None) -> None:
    label = importlib.import_module("mpipe_timeline").partition_of
    assert label("S3") == ("S3", 3)
    assert label("S of x 2") == ("S'2", 2)
    assert label("offload T_DI 0") == ("D0", 0)
    assert label("prefetch T_M 11") == ("H11", 11)
    assert label("routing weights") == ("routing weights", None)


def test_a_timeline_of_made_up_spans_has_a_colour_for_each_partition(
    scripts: None, tmp_path: Path
) -> None:
    from matplotlib.image import imread

    timeline = importlib.import_module("mpipe_timeline")
    spans = [Span("exchange", f"S{n}", 10**6 * n, 10**6 * (n + 1), 1 << 20) for n in range(4)]
    timeline.draw(spans, tmp_path / "t.png", "made up")
    pixels = (imread(tmp_path / "t.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
    drawn = {tuple(pixel) for pixel in pixels.tolist()}
    for colour in ("#2f6db3", "#c8702a", "#2f7d4f", "#7b4fa3"):
        assert tuple(bytes.fromhex(colour[1:])) in drawn
    with pytest.raises(ConfigError, match="no spans"):
        timeline.draw([], tmp_path / "none.png", "nothing")


def test_a_layer_that_never_settles_is_an_error(scripts: None) -> None:
    layers = importlib.import_module("mpipe_layers")

    class Undecided(nn.Module):
        def best_partitions(self, tokens: int) -> None:
            return None

    with pytest.raises(RuntimeError, match="after 40 steps"):
        layers.search(Undecided(), lambda: None, 8, torch.device("cpu"))
