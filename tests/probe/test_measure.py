"""The machine's limits: measured where there is no GPU."""

import pytest
import torch

from overspill.compute.cpu_kernel import cpu_isa
from overspill.probe.measure import measure_machine
from tests.probe.little import LITTLE, assert_limits

CPU = torch.device("cpu")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_machine_without_a_gpu_is_measured(threads: int) -> None:
    told: list[tuple[int, int]] = []
    limits = measure_machine(
        CPU, threads, lambda _, done, total: told.append((done, total)), LITTLE
    )
    assert_limits(limits)
    assert (limits.cores, limits.kernel) == (threads, cpu_isa())
    assert told == [(n, len(told) - 1) for n in range(len(told))]


def test_torch_gets_its_threads_back() -> None:
    before = torch.get_num_threads()
    measure_machine(CPU, 1, None, LITTLE)
    assert torch.get_num_threads() == before
