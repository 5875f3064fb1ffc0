"""The activations that kernels have: numbers and forms that Python, Triton and C++ share."""

from enum import IntEnum
from typing import NamedTuple


class Function(IntEnum):
    """The functions that kernels have, by the numbers that Python, the Triton kernels and
    `Function` of cpu_group.h share."""

    GELU = 0
    """The exact one, with erf."""
    SILU = 1
    RELU = 2
    """Its derivative at 0 is 0."""
    CLAMPED = 3
    """That of GPT-OSS, whose gates and up values alternate: on the CPU, and in decoding steps."""


class Form(NamedTuple):
    """An activation that kernels have: a function, of the gate and times up if `gated`."""

    function: Function
    gated: bool

    @classmethod
    def usual(cls, gated: bool) -> "Form":
        """Gated SiLU or GELU."""
        return cls(Function.SILU if gated else Function.GELU, gated)
