"""The tables fit a terminal and say who wins."""

import dataclasses

import pytest
from rich.console import Console
from rich.table import Table

from overspill.hardware.profile import Curve
from overspill.probe.table import (
    costs_lines,
    costs_table,
    lacking,
    limits_table,
)
from tests.hardware.test_profile import some_costs, some_limits


def _text(table: Table) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    text = capture.get()
    assert "…" not in text
    return text


def test_every_number_of_tokens_has_its_winner() -> None:
    cpu = Curve((1, 4, 16), (0.1, 0.2, 100.0))
    costs = dataclasses.replace(some_costs(), cpu_forward=cpu, cpu_backward=Curve((1,), (1000.0,)))
    rows = [line.split() for line in _text(costs_table(costs)).splitlines()]
    winners = {row[0]: (row[4], row[7]) for row in rows if row and row[0].isdigit()}
    assert winners == {
        "1": ("CPU", "GPU"),
        "4": ("CPU", "GPU"),
        "16": ("GPU", "GPU"),
    }
    lines = costs_lines(costs)
    assert lines[0] == "forward: the CPU is faster up to 4 tokens"
    assert lines[1].endswith("load and GPU are faster even at 1 token")
    assert costs_lines(some_costs())[0].endswith("up to 16 tokens, the most that was measured")


def test_limits_are_named_for_what_they_are() -> None:
    text = _text(limits_table(some_limits(), gpu=True))
    assert "10.0 GB/s" in text
    assert "copies from host to GPU" in text
    assert "within host memory" in _text(limits_table(some_limits(), gpu=False))


@pytest.mark.parametrize(
    ("cores", "kernel", "gpu", "words"),
    [
        (16, "amx", True, []),
        (16, "avx512", True, ["no AMX"]),
        (16, "avx2", True, ["no AVX-512"]),
        (16, "generic", True, ["no AVX2"]),
        (1, "none", False, ["no GPU", "one core", "no working C++ compiler"]),
    ],
)
def test_what_the_machine_lacks_is_said(
    cores: int, kernel: str, gpu: bool, words: list[str]
) -> None:
    lines = lacking(cores, kernel, gpu)
    assert len(lines) == len(words)
    assert all(line.startswith(word) for line, word in zip(lines, words, strict=True))
