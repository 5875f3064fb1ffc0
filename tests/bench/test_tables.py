"""Tables of the docs, made from records."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.tables import (
    HEADLINE,
    OVERVIEW,
    PACKED,
    RESULTS,
    SUMMARY,
    fill,
    main,
    outdated,
    read_records,
)

TEXT = "# Speed\n<!-- bench:train start -->\nold\n<!-- bench:train end -->\nkept\n"


def record(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "command": f"PYTHONPATH=src python3 bench/train.py {name}",
        "commit": "abc1234",
        "date": "2025-03-02T10:00:00+00:00",
        "hardware": {
            "gpu": {"name": "H200", "memory_gib": 139.8},
            "cpu": "Xeon",
            "cores": 16,
            "ram_gib": 125.0,
        },
        "versions": {"torch": "2.11.0"},
        "config": {},
        "metrics": {
            "speed": {"median": 11342.2, "low": 11200.0, "high": 11400.0, "unit": "tok/s"},
            "memory": {"median": 11.25, "low": 11.25, "high": 11.25, "unit": "GiB"},
        },
        "limit": {"value": 22684.4, "unit": "tok/s", "source": "Adam alone"},
        **changes,
    }


def test_a_line_has_the_figure_its_share_and_its_command() -> None:
    filled = fill(TEXT, [record("train-w1", config={"row": "W1 | step"}), record("adam-kernel")])
    assert (
        "| work | figure (low–high) | limit, and share of it |\n"
        "| --- | --- | --- |\n"
        "| W1 \\| step | 11,342 tok/s (11,200–11,400) | 22,684 tok/s (Adam alone): 50% |\n"
    ) in filled
    assert "```bash\nPYTHONPATH=src python3 bench/train.py train-w1\n```" in filled
    assert "Measured on H200 (140 GiB), 16 cores of Xeon, 125 GiB RAM, torch 2.11.0" in filled
    assert "2025-03-02 at abc1234" in filled
    assert filled.startswith("# Speed\n<!-- bench:train start -->\n")
    assert filled.endswith("<!-- bench:train end -->\nkept\n")
    assert "old" not in filled
    assert "adam" not in filled


def test_limits_are_ratios_to_another_mode() -> None:
    made = record(
        "pregate-switch-64",
        metrics={"speed": {"median": 30.0, "low": 29.0, "high": 31.0, "unit": "tokens/s"}},
        limit={"value": 40.0, "unit": "tokens/s", "source": "reading experts"},
        table=[{"mode": "gpu-only", "tokens/s": 80.0}, {"mode": "pre-gated", "tokens/s": 30.0}],
        config={"row": "Switch", "compare": "paper: 0.81"},
    )
    text = "<!-- bench:limits start -->\n<!-- bench:limits end -->\n"
    assert (
        "| Switch | gpu-only | 0.375 times | 0.500 times (reading experts): 75% | paper: 0.81 |"
    ) in fill(text, [made])
    assert "*Not measured yet.*" in fill(text, [])


def test_steal_time_is_shown_from_one_percent_on() -> None:
    hardware = record("train-w1")["hardware"]
    for stolen, shown in ((0.123, True), (0.004, False)):
        filled = fill(TEXT, [record("train-w1", hardware={**hardware, "stolen": stolen})])
        assert ("at abc1234 (steal time 12%)" in filled) == shown


def test_filling_twice_changes_nothing() -> None:
    once = fill(TEXT, [record("train-w1")])
    assert fill(once, [record("train-w1")]) == once


def test_columns_that_a_record_asks_for_appear() -> None:
    config = {"compare": "DeepSpeed 5,200", "show": ["memory"]}
    filled = fill(TEXT, [record("train-a", config=config), record("train-b", limit=None)])
    head = next(line for line in filled.splitlines() if line.startswith("| work"))
    assert head.strip("| ").split(" | ")[2:] == [
        "other figures",
        "limit, and share of it",
        "compare",
    ]
    assert "| memory 11.2 GiB |" in filled
    assert "| DeepSpeed 5,200 |" in filled


def test_a_record_with_a_table_is_a_table_of_its_own() -> None:
    rows = [{"experts": 8, "tok/s": 10240.4}, {"experts": 16, "on the GPU": None}]
    filled = fill(TEXT, [record("train-scale", table=rows, config={"row": "MoE-L"})])
    assert "**MoE-L** (`PYTHONPATH=src python3 bench/train.py train-scale`)" in filled
    assert (
        "| experts | tok/s | on the GPU |\n| --- | --- | --- |\n| 8 | 10,240 |  |\n| 16 |  | – |\n"
    ) in filled
    assert "| work |" not in filled


def test_the_picture_of_a_record_is_above_its_table() -> None:
    config = {"row": "Figure 8", "picture": "figure-8.png"}
    filled = fill(TEXT, [record("train-w1", config=config, table=[{"n": 4, "ms": 1.2345}])])
    assert "![Figure 8](figure-8.png)\n\n| n | ms |\n| --- | --- |\n| 4 | 1.23 |" in filled


def test_the_headline_has_figures_above_their_words() -> None:
    speed = {"speed": _metric(17188.5, "tokens/s"), "memory": _metric(3.9, "GiB")}
    records = [record("residency-w1-5gib", metrics=speed), record("train-w1-16x1024")]
    filled = fill(TEXT.replace("bench:train", "bench:headline"), records)
    words = HEADLINE["residency-w1-5gib"]
    assert f"| 17,188 tokens/s |\n| --- |\n| {words} |\n" in filled
    assert "torch 2.11.0; 2025-03-02 at abc1234.</sub>" in filled


def test_the_readme_has_five_rows_of_results_and_three_figures() -> None:
    names = {record["name"] for record in read_records(RESULTS)}
    assert len(SUMMARY) == 5
    assert len(HEADLINE) == 3
    assert {*SUMMARY, *OVERVIEW, *HEADLINE} <= names


def test_the_overview_shows_chosen_records_in_its_own_order() -> None:
    records = [
        record("load-30gb", config={"row": "load"}, metrics={"rate": _metric(2.5, "GB/s")}),
        record("train-w1-16x1024", config={"row": "W1", "compare": "peer 5"}),
        record(
            "train-w1-vs-deepspeed",
            config={"row": "ratio"},
            metrics={"ratio": _metric(2.5, "×"), "gpu_memory": _metric(12.5, "GiB")},
            table=[{"work": "both clip"}, {"work": "one clips"}],
        ),
        record("train-w1"),
    ]
    filled = fill(TEXT.replace("bench:train", "bench:overview"), records)
    assert [line for line in filled.splitlines() if line.startswith("|")] == [
        "| work | figure (low–high) | memory | compare | measured |",
        "| --- | --- | --- | --- | --- |",
        "| W1 | 11,342 tok/s (11,200–11,400) |  | peer 5 | 2025-03-02 at abc1234 |",
        "| ratio, both clip | 2.50 × | GPU 12.5 GiB |  | 2025-03-02 at abc1234 |",
        "| load | 2.50 GB/s |  |  | 2025-03-02 at abc1234 |",
    ]
    assert "RAM, torch 2.11.0.</sub>" in filled
    assert fill(filled, records) == filled


def _metric(value: float, unit: str) -> dict[str, Any]:
    return {"median": value, "low": value, "high": value, "unit": unit}


def test_a_name_takes_whole_words_only() -> None:
    filled = fill(TEXT.replace("train", "train-w1"), [record("train-w1"), record("train-w10")])
    assert filled.count("11,342") == 1


def test_a_record_is_shown_under_the_longest_name_that_fits() -> None:
    peers = TEXT.replace("train", "train-w1-vs-deepspeed")
    records = [record("train-w1"), record("train-w1-vs-deepspeed", table=[{"ratio": 2.5}])]
    own, others = fill(peers + TEXT, records).split("kept\n")[:2]
    assert "2.5" in own
    assert "11,342" in others
    assert "2.5" not in others
    assert "2.5" in fill(TEXT, records), "without a table of its own it is shown with the others"


def test_a_record_is_outdated_when_src_has_changed_or_its_commit_is_unknown(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        user = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null")
        done = ["git", *user, *arguments]
        return subprocess.run(
            done, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(file: str) -> str:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        git("add", file)
        git("commit", "-qm", file)
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    old, new = commit("src/a.py"), commit("src/b.py")
    commit("docs/c.md")
    records = [record("old", commit=old), record("new", commit=new), record("lost", commit="ab12")]
    assert list(outdated(records, tmp_path)) == [
        f"old: src has changed since {old} (commits: 1)",
        "lost: measured at commit ab12, which is unknown here",
    ]


def test_no_record_is_said_and_a_lone_marker_is_an_error() -> None:
    assert "*Not measured yet.*" in fill(TEXT, [])
    with pytest.raises(ValueError, match="needs its"):
        fill(TEXT.replace("<!-- bench:train end -->", "<!-- bench:tran end -->"), [])


def test_records_are_in_counting_order(tmp_path: Path) -> None:
    for name in ("scale-64", "scale-8", "scale-16", "adam"):
        (tmp_path / f"{name}.json").write_text(json.dumps(record(name)))
    assert [one["name"] for one in read_records(tmp_path)] == [
        *("adam", "scale-8", "scale-16", "scale-64"),
    ]


def test_packed_experts_have_a_table_of_their_own() -> None:
    def marked(name: str) -> str:
        return f"<!-- bench:{name} start -->\n<!-- bench:{name} end -->\n"

    records = [record(name) for name in ("serve-w2-gpu", "serve-w2-gpu-4bit", "prefill-30b-4bit")]
    plain, _, own = fill(marked("serve") + marked("packed"), records).partition("bench:serve end")
    assert "| serve-w2-gpu |" in plain
    assert "4bit" not in plain
    assert own.index("| serve-w2-gpu-4bit |") < own.index("| prefill-30b-4bit |")
    missing = own[own.index("*Not measured yet: ") :]
    assert [name for name in PACKED if f"`{name}`" not in missing] == [
        "serve-w2-gpu-4bit", "prefill-30b-4bit",
    ]  # fmt: skip


def test_check_tells_and_write_mends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, readme = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    (results / "train-w1.json").write_text(json.dumps(record("train-w1")))
    readme.write_text(TEXT)
    check = ["--results", str(results), "--check", str(readme)]
    assert main(check) == 1
    assert readme.read_text() == TEXT, "--check writes nothing"
    assert "warning" not in capsys.readouterr().err
    assert main(["--results", str(results), "--write", str(readme)]) == 0
    warned = "warning: train-w1: measured at commit abc1234, which is unknown here\n"
    assert capsys.readouterr().err == warned
    assert "11,342" in readme.read_text()
    assert main(check) == 0
    with pytest.raises(SystemExit) as exit:
        main(["--check", str(tmp_path / "missing.md")])
    assert exit.value.code == 2
