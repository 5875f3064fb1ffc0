"""docs/cpu-experts.md: its code runs, and it names all flags and costs."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from overspill import Settings
from overspill.cli.main import commands
from overspill.hardware.profile import Curve, ExpertCosts
from overspill.probe.table import lacking
from overspill.train.config import MemorySection

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cpu-experts.md").read_text()


@pytest.fixture(scope="module")
def ran() -> Iterator[dict[str, Any]]:
    """The variables of the page's Python code, run from top to bottom."""
    names: dict[str, Any] = {}
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    exec(compile(code, "docs/cpu-experts.md", "exec"), names)
    yield names
    names["model"].overspill.close()
    names["tuned"].overspill.close()


def test_the_split_is_the_one_in_its_comments(ran: dict[str, Any]) -> None:
    assert ran["on_cpu"] == set(range(2, 9))
    assert f"{ran['alone'] * 1e3:.1f} ms" == "5.4 ms"
    assert f"{ran['shared'] * 1e3:.1f} ms" == "3.5 ms"


def test_the_simulator_draws_the_imbalance_it_was_asked_for(ran: dict[str, Any]) -> None:
    assert ran["g"] == pytest.approx(0.4, abs=0.02)


def test_cpu_experts_are_off_by_default_as_the_page_says() -> None:
    assert "**They are off by default**" in PAGE
    assert not Settings().cpu_experts
    assert not MemorySection().cpu_experts
    assert "**off unless you ask for it**" in PAGE
    assert not Settings().cpu_training
    assert not MemorySection().cpu_training


def test_it_names_every_flag_of_the_probe_and_no_other() -> None:
    probe = typer.main.get_command(commands).commands["probe"]  # type: ignore[attr-defined]
    options = [flag for p in probe.params for flag in (*p.opts, *p.secondary_opts)]
    named = set(re.findall(r"--[a-z][a-z-]*", PAGE))
    assert named - {"--cpu-experts", "--cpu-training", "--popularity"} == set(options) - {"--help"}


def test_it_names_every_cost_of_an_expert() -> None:
    (table,) = re.findall(r"\| in the formula \|.*?\n\n", PAGE, re.DOTALL)
    fields = " ".join(row.split("|")[2] for row in table.strip().splitlines())
    named = set(re.findall(r"`(\w+)`", fields))
    costs = {f.name for f in dataclasses.fields(ExpertCosts) if f.type in (float, Curve)}
    assert named == costs


@pytest.mark.parametrize("kernel", ["none", "generic", "avx2", "avx512", "amx"])
def test_it_quotes_the_messages_about_missing_features(kernel: str) -> None:
    assert all(f"`{line}`" in PAGE for line in lacking(cores=1, kernel=kernel, gpu=False))
