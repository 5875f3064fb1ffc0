"""The activations of experts in plain torch."""

import pytest
import torch.nn.functional as F
from torch import Tensor

from overspill.compute.activation import clamped_gate, limited_gate
from overspill.compute.activation_form import Form, Function

_FUNCTIONS = {
    Function.GELU: F.gelu,
    Function.SILU: F.silu,
    Function.RELU: F.relu,
    Function.RELU2: lambda x: F.relu(x) ** 2,
}
FORMS = [Form(function, gated) for function in _FUNCTIONS for gated in (False, True)]
"""Forms of `Fused`."""
every_form = pytest.mark.parametrize(
    "form", FORMS, ids=[("gated " if form.gated else "") + form.function.name for form in FORMS]
)


def activation_oracle(h: Tensor, form: Form) -> Tensor:
    if form.function is Function.CLAMPED:
        return clamped_gate(h)
    if form.function is Function.LIMITED:
        return limited_gate(h)
    function = _FUNCTIONS[form.function]
    if not form.gated:
        return function(h)
    gate, up = h.chunk(2, -1)
    return function(gate) * up
