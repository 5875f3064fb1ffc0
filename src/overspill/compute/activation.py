"""The activation of an expert, forward and backward, with few passes over memory.

Shapes: R token rows, H hidden. `h` is the pre-activation: [R, H], or [R, 2H] (gate, then up) for
gated activations. Functions that have no kernels use autograd.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overspill.compute.activation_form import Form, Function
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

    @property
    def name(self) -> str:
        """Name of the function in messages."""

    def forward(self, h: Tensor) -> Tensor: ...

    def backward(
        self, h: Tensor, da_RH: Tensor, row_weight_R: Tensor, overwrite_h: bool
    ) -> ActivationGrads:
        """Return the gradients of the activation, in one pass.

        `da_RH` is dy @ w_out, not yet multiplied by the routing weight. The result may overwrite
        `da_RH`, and with `overwrite_h` also `h`.
        """


class Fused:
    """GELU, SiLU, ReLU or its square, perhaps gated, with one kernel per direction. By default
    gated SiLU, or GELU without a gate."""

    def __init__(self, gated: bool, function: Function | None = None) -> None:
        self.form = Form.usual(gated) if function is None else Form(function, gated)
        assert self.form.function in _FUNCTIONS

    @property
    def name(self) -> str:
        return ("gated " if self.form.gated else "") + _FUNCTIONS[self.form.function].name

    def forward(self, h: Tensor) -> Tensor:
        if not _fused(h):
            return activate_torch(h, self.form)
        from overspill.compute import activation_triton

        return activation_triton.activate(h, self.form)

    def backward(
        self, h: Tensor, da_RH: Tensor, row_weight_R: Tensor, overwrite_h: bool
    ) -> ActivationGrads:
        if not _fused(h):
            return activate_backward_torch(h, da_RH, row_weight_R, self.form)
        from overspill.compute import activation_triton

        return ActivationGrads(
            *activation_triton.activate_backward(h, da_RH, row_weight_R, self.form, overwrite_h)
        )


class Differentiated:
    """Any function of the rows of h, differentiated by autograd."""

    def __init__(self, function: Callable[[Tensor], Tensor], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

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


class _TorchFunction(NamedTuple):
    name: str
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """Computes the gradient of the argument from that of the result and the argument."""


def _relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    dx: Tensor = torch.ops.aten.threshold_backward(grad, x, 0)
    return dx


def _relu2_backward(grad: Tensor, x: Tensor) -> Tensor:
    return grad * (2 * F.relu(x))


_FUNCTIONS = {
    Function.GELU: _TorchFunction("GELU", F.gelu, torch.ops.aten.gelu_backward),
    Function.SILU: _TorchFunction("SiLU", F.silu, torch.ops.aten.silu_backward),
    Function.RELU: _TorchFunction("ReLU", F.relu, _relu_backward),
    Function.RELU2: _TorchFunction("ReLU2", lambda x: F.relu(x).square(), _relu2_backward),
}
"""Functions that `Fused` has."""


def activation_named(name: str, gated: bool) -> Fused:
    """Return the activation that a user chose for an `overspill.MoELayer`."""
    found = {function.name.lower(): function for function in _FUNCTIONS}
    if name not in found:
        raise ConfigError(f"activation={name!r} must be one of {', '.join(found)}")
    return Fused(gated, found[name])


def function_of(module: Callable[[Tensor], Tensor]) -> Function | None:
    """Return the function that an activation module computes exactly, for every argument; None if
    kernels have no such function. Modules with parameters, such as PReLU, have none: training
    changes them."""
    if isinstance(module, nn.Module) and next(module.parameters(), None) is not None:
        return None
    limits = 4, 64  # some clip large values
    ranges = [torch.linspace(-n, n, 33, dtype=torch.float64, device="cpu") for n in limits]
    probe = torch.cat(ranges)
    values = module(probe)
    equal = (f for f, own in _FUNCTIONS.items() if torch.equal(values, own.forward(probe)))
    return next(equal, None)


def form_of(activation: Activation | None, gated: bool) -> Form | None:
    """Return the form in which kernels compute an activation, as it is now; None if they do not.
    Kernels of the CPU and of decoding steps have the functions of `_WHOLE` too. The default
    activation is gated SiLU, or GELU without a gate."""
    if activation is None:
        return Form.usual(gated)
    if isinstance(activation, Fused):
        return activation.form
    found = (f for f, own in _WHOLE.items() if gated and _is_same(activation, own))
    function = next(found, None)
    return None if function is None else Form(function, gated)


def clamped_gate(h: Tensor) -> Tensor:
    """Compute the activation of GPT-OSS, whose gates and up values alternate in a row."""
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def limited_gate(h: Tensor) -> Tensor:
    """Compute the activation of Hy-V4 and DeepSeek-V4."""
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)


_WHOLE = {Function.CLAMPED: clamped_gate, Function.LIMITED: limited_gate}
"""Functions of gates and up values together."""


def _is_same(activation: Activation, function: Callable[[Tensor], Tensor]) -> bool:
    """Whether an activation is a function, as it is now: the values show it."""
    values = torch.linspace(-12, 13, 24, dtype=torch.float64, device="cpu")
    pairs = torch.cartesian_prod(values, values).view(1, -1)
    expected, found = function(pairs), activation.forward(pairs)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-9, atol=0)


def activate_torch(h: Tensor, form: Form) -> Tensor:
    """Compute an activation with torch. 16-bit inputs are computed in float32 and rounded once."""
    function = _FUNCTIONS[form.function].forward
    if not form.gated:
        return function(h)
    gate, up = h.to(_wide(h)).chunk(2, dim=-1)
    return (function(gate) * up).to(h.dtype)


def activate_backward_torch(
    h: Tensor, da_RH: Tensor, row_weight_R: Tensor, form: Form
) -> ActivationGrads:
    """Compute `Fused.backward` with torch. Does not change its inputs."""
    wide, function = _wide(h), _FUNCTIONS[form.function]
    h_wide, da = h.to(wide), da_RH.to(wide)
    weight_R1 = row_weight_R.to(wide).unsqueeze(-1)
    gate, up = h_wide.chunk(2, dim=-1) if form.gated else (h_wide, None)
    value = function.forward(gate)
    a = value if up is None else value * up
    drow_weight_R = (a * da).sum(-1)
    da = da * weight_R1
    if up is None:
        dh = function.backward(da, gate)
    else:
        dh = torch.cat((function.backward(da * up, gate), da * value), dim=-1)
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
