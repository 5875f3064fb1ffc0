"""Tensors for tests of the decoding kernels, and how near results must be."""

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.compute.test_grouped_triton import FP32, TOLERANCE

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
NAN = float("nan")


def random(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> Tensor:
    return torch.randn(shape).to(device, dtype)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    """`dtype` is that of the inputs; errors are relative to the largest value. The interpreter
    cuts values off where a GPU rounds them to bf16."""
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).abs().max()
    assert error <= roundings * TOLERANCE[dtype] * expected.double().abs().max()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
