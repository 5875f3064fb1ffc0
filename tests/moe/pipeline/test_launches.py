"""How many operations of torch a training step needs: each takes the host some microseconds, which
small batches cannot hide."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import overspill
from bench.loopback import LoopbackExchange
from overspill.compute import grouped

D = 16


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(partitions: int) -> int:
    """Of forward and backward, with grouped products as on a GPU; views are counted too."""
    layer = overspill.MoELayer(
        D,
        32,
        1,
        1,
        partitions=partitions,
        strategy="none",
        exchange=LoopbackExchange("cpu"),
        dtype=torch.bfloat16,
    )
    x = torch.randn(64, D, dtype=torch.bfloat16, requires_grad=True)
    with grouped.forced("torch"):
        layer(x)[0].sum().backward()
        with Operations() as counted:
            layer(x)[0].sum().backward()
    return counted.count


def test_a_step_needs_few_operations_and_a_partition_fewer() -> None:
    one, four = operations(1), operations(4)
    assert one < 155
    assert (four - one) / 3 < 85
