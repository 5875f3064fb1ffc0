# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Activations of experts inside kernels."""

import triton
import triton.language as tl

from overspill.compute.activation_form import Function
from overspill.compute.activation_triton import value_of

CLAMPED = tl.constexpr(int(Function.CLAMPED))
LIMITED = tl.constexpr(int(Function.LIMITED))
_SILU = tl.constexpr(int(Function.SILU))


@triton.jit
def activate(g, u, kind: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr):
    """Return the activation of values that were rounded to `kind`, also rounded to it."""
    g, u = g.to(kind).to(tl.float32), u.to(kind).to(tl.float32)
    if FUNCTION == CLAMPED:
        g = tl.minimum(g, 7.0)
        u = tl.minimum(tl.maximum(u, -7.0), 7.0)
        result = (u + 1.0) * g * tl.sigmoid(g * 1.702)
    elif FUNCTION == LIMITED:
        g = tl.minimum(g, 10.0)
        u = tl.minimum(tl.maximum(u, -10.0), 10.0)
        result = value_of(g, _SILU) * u
    else:
        result = value_of(g, FUNCTION)
        if GATED:
            result *= u
    return result.to(kind)
