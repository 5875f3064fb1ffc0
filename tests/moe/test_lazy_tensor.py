"""A lazy tensor behaves like the tensor it reads."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from overspill.moe.lazy_tensor import LazyTensor

VALUE = torch.arange(6.0).view(2, 3)


class Source:
    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> Tensor:
        self.reads += 1
        return VALUE.clone()


def lazy() -> tuple[LazyTensor, Source]:
    source = Source()
    return LazyTensor((2, 3), torch.float32, source), source


def test_metadata_needs_no_read() -> None:
    tensor, source = lazy()
    assert isinstance(tensor, Tensor)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((2, 3), torch.float32, VALUE.device)
    assert (tensor.ndim, tensor.dim(), tensor.size(1), tensor.numel()) == (2, 2, 3, 6)
    assert (tensor.nbytes, tensor.element_size()) == (24, 4)
    assert tensor.is_floating_point()
    assert not tensor.is_meta
    assert not tensor.requires_grad
    assert source.reads == 0


def saved(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"a": tensor}, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)["a"]
    return loaded


def loaded_by_a_module(tensor: Tensor) -> Tensor:
    module = nn.Linear(3, 2, bias=False)
    module.load_state_dict({"weight": tensor})
    return module.weight.detach()


USES: list[Callable[[Any], Any]] = [
    lambda t: t.clone(),
    lambda t: t.detach(),
    lambda t: t[:],
    lambda t: t.to(torch.float64).float(),
    lambda t: torch.zeros(2, 3).copy_(t),
    lambda t: torch.zeros(2, 3) + t,
    lambda t: torch.cat([t[:1], t[1:]]),
    lambda t: torch.from_numpy(t.numpy()),
    copy.copy,
    copy.deepcopy,
    saved,
    loaded_by_a_module,
]


@pytest.mark.parametrize("use", USES)
def test_every_use_gives_the_values(use: Callable[[Any], Any]) -> None:
    tensor, _ = lazy()
    made = use(tensor)
    assert torch.equal(made, VALUE)
    assert torch.equal(tensor, VALUE)


def test_it_is_read_once() -> None:
    tensor, source = lazy()
    address = tensor.data_ptr()
    tensor.add_(1)
    assert torch.equal(tensor, VALUE + 1)
    assert (tensor.data_ptr(), source.reads) == (address, 1)


def test_safetensors_writes_it(tmp_path: Path) -> None:
    save_file({"a": lazy()[0], "b": lazy()[0]}, tmp_path / "file.safetensors")
    written = load_file(tmp_path / "file.safetensors")
    assert torch.equal(written["a"], VALUE)
    assert torch.equal(written["b"], VALUE)
