"""docs/moe-layer.md: its code runs, in one process and on two ranks."""

import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.parallel.processes import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "moe-layer.md").read_text()
ALONE, ON_RANKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run_code(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "docs/moe-layer.md", "exec"), names)
    return names


def run_on_rank(mesh: DeviceMesh) -> tuple[int, torch.Tensor]:
    layer = run_code("import overspill, torch\n" + ON_RANKS)["layer"]
    return len(layer.w_in), layer.router.weight.grad


def test_its_first_program_learns() -> None:
    losses = run_code(ALONE)["losses"]
    assert losses[-1] < losses[0]


def test_its_second_program_averages_gradients_of_two_ranks() -> None:
    (held, grad), (other_held, other_grad) = run_ranks(2, run_on_rank)
    assert held == other_held == 4
    assert torch.equal(grad, other_grad)
