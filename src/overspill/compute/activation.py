"""The activation of an expert, forward and backward, with few passes over memory.

Shapes: R token rows, H hidden. `h` is the pre-activation: [R, H] for GELU, [R, 2H] (gate, then up)
for gated SiLU. Other functions of a row use autograd.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.hardware.native import has_triton


class ActivationGrads(NamedTuple):
    weighted_RH: Tensor
    """row_weight * activation. dw_out is dy^T times this, without a scaled copy of dy."""
    dh: Tensor
    """Gradient of the pre-activation, including the routing weight."""
    drow_weight_R: Tensor
    """Gradient of the routing weight of each row, float32 or wider."""


class Activation(Protocol):
    """The function between the two matrices of an expert."""

    def forward(self, h: Tensor) -> Tensor: ...

    def backward(
        self, h: Tensor, da_RH: Tensor, row_weight_R: Tensor, overwrite_h: bool
    ) -> ActivationGrads:
        """The gradients of the activation, in one pass.

        `da_RH` is dy @ w_out, not yet multiplied by the routing weight. The result may overwrite
        `da_RH`, and with `overwrite_h` also `h`.
        """


class Fused:
    """GELU (exact, with erf) or SiLU(gate) * up, with one kernel per direction."""

    def __init__(self, gated: bool) -> None:
        self.gated = gated

    def forward(self, h: Tensor) -> Tensor:
        if not _fused(h):
            return activate_torch(h, self.gated)
        from overspill.compute import activation_triton

        return activation_triton.activate(h, self.gated)

    def backward(
        self, h: Tensor, da_RH: Tensor, row_weight_R: Tensor, overwrite_h: bool
    ) -> ActivationGrads:
        if not _fused(h):
            return activate_backward_torch(h, da_RH, row_weight_R, self.gated)
        from overspill.compute import activation_triton

        return ActivationGrads(
            *activation_triton.activate_backward(h, da_RH, row_weight_R, self.gated, overwrite_h)
        )


class Differentiated:
    """Any function of the rows of h, differentiated by autograd."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)

    def backward(
        self, h: Tensor, da_RH: Tensor, row_weight_R: Tensor, overwrite_h: bool
    ) -> ActivationGrads:
        wide = _wide(h)
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            a = self.function(h)
        weight_R1 = row_weight_R.to(wide).unsqueeze(-1)
        drow_weight_R = (a.detach().to(wide) * da_RH).sum(-1)
        (dh,) = torch.autograd.grad(a, h, (da_RH * weight_R1).to(a.dtype))
        return ActivationGrads((a.detach() * weight_R1).to(h.dtype), dh, drow_weight_R)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
}


class Named(Differentiated):
    """One of the usual functions; gated: of the first half of a row, times the second half."""

    def __init__(self, name: str, gated: bool) -> None:
        self.name, self.gated = name, gated

    def function(self, h: Tensor) -> Tensor:
        function = _FUNCTIONS[self.name]
        if not self.gated:
            return function(h)
        gate, up = h.chunk(2, dim=-1)
        return function(gate) * up


def activation_named(name: str, gated: bool) -> Activation | None:
    """None for GELU and for gated SiLU, which are those of `Fused`."""
    if name not in _FUNCTIONS:
        raise ConfigError(f"activation={name!r} must be one of {', '.join(_FUNCTIONS)}")
    fused = (name, gated) in (("gelu", False), ("silu", True))
    return None if fused else Named(name, gated)


def clamped_gate(h: Tensor) -> Tensor:
    """The activation of GPT-OSS. Gate and up alternate in a row."""
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def is_clamped(activation: Activation | None) -> bool:
    """Whether an activation is `clamped_gate`, as it is now: the values show it."""
    if not isinstance(activation, Differentiated):
        return False
    values = torch.linspace(-9, 10, 24, dtype=torch.float64, device="cpu")
    pairs = torch.cartesian_prod(values, values).view(1, -1)
    expected, found = clamped_gate(pairs), activation.forward(pairs)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-9, atol=0)


def activate_torch(h: Tensor, gated: bool) -> Tensor:
    """Torch implementation. 16-bit inputs are computed in float32 and rounded once."""
    if not gated:
        return F.gelu(h)
    gate, up = h.to(_wide(h)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(h.dtype)


def activate_backward_torch(
    h: Tensor, da_RH: Tensor, row_weight_R: Tensor, gated: bool
) -> ActivationGrads:
    """Torch implementation of `Fused.backward`. Does not change its inputs."""
    wide = _wide(h)
    h_wide, da = h.to(wide), da_RH.to(wide)
    weight_R1 = row_weight_R.to(wide).unsqueeze(-1)
    if gated:
        gate, up = h_wide.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        a = silu * up
    else:
        a = F.gelu(h_wide)
    drow_weight_R = (a * da).sum(-1)
    da = da * weight_R1
    if gated:
        dgate = da * up * (sigmoid + silu * (1 - sigmoid))
        dh = torch.cat((dgate, da * silu), dim=-1)
    else:
        dh = torch.ops.aten.gelu_backward(da, h_wide)
    return ActivationGrads((a * weight_R1).to(h.dtype), dh.to(h.dtype), drow_weight_R)


def _wide(h: Tensor) -> torch.dtype:
    return torch.promote_types(h.dtype, torch.float32)


def _fused(h: Tensor) -> bool:
    """Whether the fused kernels support this tensor: on a GPU with Triton installed."""
    return (
        h.is_cuda
        and h.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and h.numel() > 0
        and has_triton("fused activation")
    )
