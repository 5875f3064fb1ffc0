"""The benchmark of the quality of pre-gates, with a toy: what it measures, records and draws."""

import gzip
import importlib
import json
import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("OVERSPILL_DATA", ROOT.parent / "shared" / "data"))
TINY = "--tiny --seeds 3 --base-steps 1 --steps 1 --sst2-steps 1"


@pytest.fixture
def bench(scripts: None) -> ModuleType:
    return importlib.import_module("pregate_quality")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder like that of the data, with drawn words."""
    words = random.Random(0).choices(
        ["the", "film", "town", "good", "bad", "of", "it", "was"], k=900
    )
    lines = [" " + " ".join(words[at : at + 9]) for at in range(0, 900, 9)]
    tables = ["sentence\tlabel", *(f"{line.strip()} \t{at % 2}" for at, line in enumerate(lines))]
    for name, content in {"wikitext-2/{}.txt.gz": lines, "sst2/{}.tsv.gz": tables}.items():
        for split in ("train", "valid" if "wikitext" in name else "test"):
            file = tmp_path / "data" / name.format(split)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(gzip.compress("\n".join(content).encode()))
    return tmp_path / "data"


def run(bench: ModuleType, patch: pytest.MonkeyPatch, data: Path, out: Path, flags: str) -> int:
    given = ["--data", str(data), "--out", str(out), "--measurements", str(out / "lines")]
    patch.setattr(sys, "argv", ["bench/pregate_quality.py", *given, *flags.split()])
    return int(bench.main())


def check(out: Path) -> None:
    record = json.loads((out / "pregate-quality.json").read_text())
    levels = range(4)
    for name, highest in {"perplexity": 600, "accuracy": 1}.items():
        names = [f"{name}_n{level}{when}" for level in levels for when in ("", "_before")]
        for key in [*names, *(f"{name}_n{level}_not_trained" for level in levels[1:])]:
            assert 0 <= record["metrics"][key]["median"] <= highest
    assert next(iter(record["metrics"])) == "perplexity_n1_increase"
    assert [row["N"] for row in record["table"]] == ["0", "1", "2", "3"]
    assert record["config"]["seeds"] == {"wikitext-2": [3], "sst2": [3]}
    # the base is trained without pre-gates: in it they choose other experts
    before = {record["metrics"][f"perplexity_n{level}_before"]["median"] for level in levels}
    assert len(before) > 1


@pytest.mark.slow
def test_a_later_call_continues_and_draws_the_picture(
    bench: ModuleType, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, flags = tmp_path / "out", f"{TINY} --device cpu --work {tmp_path / 'work'}"
    assert run(bench, monkeypatch, made, out, f"{flags} --parts wikitext-2") == 0
    lines = (out / "lines").read_text()
    assert "sst2" not in lines
    bases = {file: file.stat().st_mtime_ns for file in (tmp_path / "work").iterdir()}
    assert run(bench, monkeypatch, made, out, f"{flags} --plot {out / 'plot.png'}") == 0
    assert (out / "lines").read_text().startswith(lines)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "work").iterdir()} == bases
    check(out)
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="other settings"):
        run(bench, monkeypatch, made, out, f"{flags} --steps 2")


@pytest.mark.skipif(not (DATA / "wikitext-2").is_dir(), reason=f"there is no {DATA}/wikitext-2")
def test_the_files_of_wikitext_and_sst2_are_read(
    bench: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = f"{TINY} --device cpu --parts sst2"
    assert run(bench, monkeypatch, DATA, tmp_path / "out", flags) == 0
    assert "step 1: validation perplexity 5" in capsys.readouterr().out  # of 512 tokens
    record = json.loads((tmp_path / "out" / "pregate-quality.json").read_text())
    assert record["metrics"]["accuracy_n3"]["unit"] == "share"


@pytest.mark.gpu
def test_on_a_gpu_everything_is_measured(
    bench: ModuleType, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(bench, monkeypatch, made, tmp_path / "out", f"{TINY} --device cuda") == 0
    check(tmp_path / "out")


def test_without_time_nothing_is_started(
    bench: ModuleType,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(bench, monkeypatch, made, tmp_path / "out", f"{TINY} --budget-s 0") == 1
    said = capsys.readouterr()
    assert "base: not started, 0 s are left" in said.out
    assert "no record: no seed has all its measurements" in said.err


def test_wrong_flags_are_refused_by_name(
    bench: ModuleType,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (made / "sst2" / "test.tsv.gz").unlink()
    for flags, message in {
        "--tiny --parts squad": "--parts squad: choose from wikitext-2,sst2",
        "--tiny": "has no sst2/test.tsv.gz",
        "--steps 0": "argument --steps: 0 must be at least 1",
    }.items():
        with pytest.raises(SystemExit):
            run(bench, monkeypatch, made, tmp_path / "out", flags)
        assert message in capsys.readouterr().err


def figures(bench: ModuleType, seed: int, factor: float) -> list[Any]:
    """Perplexity 20 before and 10 after fine-tuning; more with pre-gates."""
    kinds = [(level, when) for level in range(4) for when in ("before", "after")]
    kinds += [(level, "not-trained") for level in (1, 2, 3)]
    values = {"before": 20.0, "after": 10.0, "not-trained": 15.0}
    return [
        bench.Measurement(
            "wikitext-2", seed, bench.Figure(level, when, values[when] * factor**level), "a"
        )
        for level, when in kinds
    ]


def test_levels_are_compared_seed_by_seed_and_incomplete_seeds_are_left_out(
    bench: ModuleType,
) -> None:
    found = figures(bench, 0, 1.01) + figures(bench, 1, 1.02) + figures(bench, 2, 9.0)[:-1]
    results = bench.Results(found, "wikitext-2")
    assert list(results.by_seed) == [0, 1]
    assert results.increases(1) == pytest.approx([1.0, 2.0])
    metrics = results.metrics("perplexity", "perplexity")
    assert metrics["perplexity_n0"].median == 10
    assert metrics["perplexity_n1_before"].high == pytest.approx(20.4)
    assert "perplexity_n0_not_trained" not in metrics
    cells = results.cells(1, "perplexity", ".2f")
    assert cells["perplexity, fine-tuned"] == "10.15 (10.10–10.20)"
    assert not bench.Results(found, "sst2").by_seed
