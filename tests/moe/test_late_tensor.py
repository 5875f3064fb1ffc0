"""A tensor that is read when it is used is, in use, the tensor it stands for."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from overspill.moe.late_tensor import LateTensor

VALUE = torch.arange(6.0).view(2, 3)


class Source:
    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> Tensor:
        self.reads += 1
        return VALUE.clone()


def late() -> tuple[LateTensor, Source]:
    source = Source()
    return LateTensor((2, 3), torch.float32, source), source


def test_what_it_is_can_be_told_without_reading() -> None:
    tensor, source = late()
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
def test_in_use_it_is_what_it_stands_for(use: Callable[[Any], Any]) -> None:
    tensor, _ = late()
    made = use(tensor)
    assert torch.equal(made, VALUE)
    assert torch.equal(tensor, VALUE)


def test_it_is_read_once() -> None:
    tensor, source = late()
    address = tensor.data_ptr()
    tensor.add_(1)
    assert torch.equal(tensor, VALUE + 1)
    assert (tensor.data_ptr(), source.reads) == (address, 1)


def test_safetensors_writes_it(tmp_path: Path) -> None:
    save_file({"a": late()[0], "b": late()[0]}, tmp_path / "file.safetensors")
    written = load_file(tmp_path / "file.safetensors")
    assert torch.equal(written["a"], VALUE)
    assert torch.equal(written["b"], VALUE)
