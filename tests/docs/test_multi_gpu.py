"""docs/multi-gpu.md: its program runs on two ranks."""

import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.parallel.processes import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "multi-gpu.md").read_text()


def run_page(mesh: DeviceMesh) -> tuple[float, torch.Tensor]:
    names: dict[str, Any] = {}
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    exec(compile(code, "docs/multi-gpu.md", "exec"), names)
    model = names["model"]
    model.overspill.close()
    return names["loss"].item(), model.embedding.weight.detach()


def test_its_code_trains_on_two_ranks() -> None:
    (loss, weight), (other_loss, other_weight) = run_ranks(2, run_page)
    assert loss != other_loss  # of other tokens
    assert torch.equal(weight, other_weight)
