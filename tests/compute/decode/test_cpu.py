"""Requests to the CPU and its results, in Triton's interpreter and on a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overspill.compute.activation_form import Form
from overspill.compute.decode import constants
from tests.compute.decode.near import NAN, needs_triton, random
from tests.compute.test_grouped_triton import every_device

pytestmark = needs_triton


@pytest.fixture
def cpu() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute.decode import cpu

    return cpu


@every_device
@pytest.mark.parametrize("several", [1, 100], ids=["once for all tokens", "for each token"])
@pytest.mark.parametrize("missed", [[0, 0, 0], [0, 0, 2]], ids=["no misses", "misses"])
def test_a_request_is_sent_if_experts_were_missed(
    cpu: Any, missed: list[int], several: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if no expert is on the device."""
    from overspill.compute.decode.experts import experts

    monkeypatch.setattr(constants, "SEVERAL", several)
    x, weights = random(3, 8, device=device), random(3, 2, device=device)
    offsets = torch.full((3, 2), constants.ABSENT, device=device)
    ready, done = (torch.full((1,), 7, dtype=torch.int32, device=device) for _ in range(2))
    # what follows the rows of this batch does not count
    counts = torch.tensor([*missed, 5], dtype=torch.int32, device=device)
    request = cpu.MissRequest(ready, done, counts)
    out = experts(x, weights, offsets, x, 4, Form.usual(True), False, False, request)
    assert (out == 0).all()
    assert (ready.item(), done.item()) == ((1, 0) if any(missed) else (7, 7))


@every_device
def test_results_of_the_cpu_are_added_to_rows_with_misses(cpu: Any, device: str) -> None:
    y, rows = random(3, 20, device=device), random(4, 20, device=device)
    missed = torch.tensor([1, 0, 2], dtype=torch.int32, device=device)
    rows[1] = rows[3] = NAN  # not read
    expected = y.clone()
    expected[[0, 2]] += rows[[0, 2]]
    cpu.add_cpu_rows(y, cpu.CpuRows(rows, missed, torch.ones_like(missed[:1])))
    assert torch.equal(y, expected)


@every_device
@pytest.mark.parametrize("everything", [False, True])
def test_experts_that_are_not_on_the_device_are_hinted(
    cpu: Any, everything: bool, device: str
) -> None:
    table = torch.tensor([8, constants.ABSENT, constants.ABSENT, 0, 16], device=device)
    ids = torch.tensor([[1, 3], [2, 0], [1, 2]], dtype=torch.int32, device=device)
    real = torch.tensor([1, 1, 0], device=device)  # the last row only fills the batch up
    ahead = torch.full((8,), 7, dtype=torch.int32, device=device)
    misses = SimpleNamespace(ahead_N=ahead, ahead_count=torch.zeros_like(ahead[:1]))
    cpu.hint(ids, None if everything else real, table, 2, misses)
    rest = [11, 12] if everything else [-1, -1]
    assert ahead.tolist() == [11, -1, 12, -1, *rest, 7, 7]
    assert misses.ahead_count.item() == 6
