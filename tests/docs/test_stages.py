"""docs/stages.md: its code runs, its arithmetic holds, and it names what is refused."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overspill.models.stages.activations import SMALL
from tests.models.stages.test_families import TUPLES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "stages.md").read_text()


@pytest.fixture(scope="module")
def ran() -> Iterator[dict[str, Any]]:
    """The variables of the page's program."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/stages.md", "exec"), names)
    yield names
    names["model"].overspill.close()


def test_its_program_learns(ran: dict[str, Any]) -> None:
    losses = ran["losses"]
    assert len(losses) == 3 * len(ran["micro_batches"])
    assert losses[-1] < losses[0]


def test_a_step_uploads_no_more_than_it_says(ran: dict[str, Any]) -> None:
    engine = ran["model"].overspill
    n_experts = engine.n_layers * engine.n_experts

    def uploads() -> float:
        engine.flush()
        return float(engine.recorder.counters()["upload"]) / engine.layout.weight_bytes

    before = uploads()
    ran["stages"].backward(ran["micro_batches"], ran["optimizer"])
    ran["optimizer"].step()
    ran["optimizer"].zero_grad()
    assert n_experts <= uploads() - before <= 2 * n_experts


def test_it_names_the_families_that_are_refused_and_the_size_of_small_tensors() -> None:
    (row,) = re.findall(r"\| blocks that return more.*", PAGE)
    assert set(re.findall(r"`(\w+)`", row)) == set(TUPLES)
    assert f"({SMALL >> 10} KiB)" in PAGE
