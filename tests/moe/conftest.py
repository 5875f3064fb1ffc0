"""Engine tests run tiny models in many threads of their own: torch gets one."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """OpenMP threads that spin between tiny products would starve the engine's on two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
