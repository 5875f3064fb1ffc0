"""The timer of the benchmark of ranks, on the CPU."""

import importlib

import pytest
import torch
from torch import Tensor

from overspill.parallel import dense
from overspill.parallel.exchange.interface import Exchange
from overspill.parallel.ranks import Ranks


class OtherRank(Ranks):
    """A rank that adds the tensor of another, which is the same."""

    def __init__(self) -> None:
        self.size = 2

    def total(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


@pytest.mark.usefixtures("scripts")
def test_means_of_dense_gradients_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Exchange, "send"), (Ranks, "gather_numbers"), (dense, "average_")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as it was, after the test
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = importlib.import_module("ranks").ExchangeTimer()
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 5.0)
    before = timer.seconds
    dense.average_(OtherRank(), [parameter.grad])
    assert timer.seconds > before
    assert torch.equal(parameter.grad, torch.full((3,), 5.0))
