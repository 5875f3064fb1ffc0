"""The thread that exchanges token rows through host memory: modes of its callers, and failures."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from overspill.core.errors import RankError
from overspill.parallel.exchange.staged import StagedExchange
from overspill.parallel.ranks import Ranks
from tests.parallel.processes import run_ranks

CPU = torch.device("cpu")


def fail_once(mesh: DeviceMesh) -> list[str]:
    calls = []

    def inject(kind: str) -> None:
        calls.append(kind)
        if len(calls) == 1:
            raise OSError("the link is down")

    exchange = StagedExchange(Ranks(mesh, CPU), CPU, inject=inject)
    rows = torch.arange(6.0).view(3, 2)
    failures = []
    for _ in range(2):
        try:
            exchange.send(rows, [3], [3]).wait()
        except RankError as error:
            failures.append(f"{error}: {type(error.__cause__).__name__}")
    return failures


def send_in_modes(mesh: DeviceMesh) -> list[float]:
    """The sums of rows that were sent in inference mode, and then as an input of a graph."""
    exchange, found = StagedExchange(Ranks(mesh, CPU), CPU), []
    with torch.inference_mode():
        found.append(exchange.send(torch.arange(6.0).view(3, 2), [3], [3]).wait().sum().item())
    weight = torch.ones(2, 2, requires_grad=True)
    (weight * exchange.send(torch.full((2, 2), 3.0), [2], [2]).wait()).sum().backward()
    assert weight.grad is not None
    return [*found, weight.grad.sum().item()]


def test_rows_travel_in_inference_mode_and_in_training() -> None:
    assert run_ranks(1, send_in_modes) == [[15.0, 12.0]]


def test_a_failed_transfer_is_raised_and_none_after_it_waits_forever() -> None:
    (failures,) = run_ranks(1, fail_once)
    assert failures == ["an exchange of token rows failed: the link is down: OSError"] * 2
