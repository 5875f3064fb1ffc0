"""The activations that kernels have: numbers and forms that Python, Triton and C++ share."""

from enum import IntEnum
from typing import NamedTuple


class Function(IntEnum):
    """Functions of kernels, with the numbers that Python, Triton kernels and `Function` of
    cpu_group.h share."""

    GELU = 0
    """Exact GELU, with erf."""
    SILU = 1
    RELU = 2
    """ReLU, whose derivative at 0 is 0."""
    CLAMPED = 3
    """Activation of GPT-OSS, whose gates and up values alternate; only on the CPU and in decoding
    steps."""
    RELU2 = 4
    """Square of ReLU."""
    LIMITED = 5
    """SiLU of gates of at most 10, times up values of -10 to 10 (Hy-V4, DeepSeek-V4); only on the
    CPU and in decoding steps."""


class Form(NamedTuple):
    """An activation of kernels: a function, or with `gated` the function of the gate times up."""

    function: Function
    gated: bool

    @classmethod
    def usual(cls, gated: bool) -> "Form":
        """Return gated SiLU, or GELU without a gate."""
        return cls(Function.SILU if gated else Function.GELU, gated)
