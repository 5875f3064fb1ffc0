"""Arguments of an AdamW update, as all kernels take them: a record and its states, the
hyperparameters, and the scalars that follow from these."""

import ctypes
import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class AdamHyper:
    """Hyperparameters of one update. `step` is 1 for the first update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0


class RecordState(NamedTuple):
    """A record and its optimizer state: flat contiguous tensors of one device and one length, all
    updated in place. Or the same elements of several records: rows [n, length] with any stride, the
    same for all tensors."""

    weight: Tensor
    """bf16 or fp32."""
    low: Tensor | None
    """int16; the low bits of the fp32 master. None for fp32 weights."""
    exp_avg: Tensor
    """fp32, or bf16 with stochastic rounding."""
    exp_avg_sq: Tensor
    """Same dtype as exp_avg."""


class RecordUpdate(NamedTuple):
    """A record, and the gradient that updates it."""

    state: RecordState
    grad: Tensor


class AdamScalars(NamedTuple):
    """Arguments of the kernels, computed in double; same fields as in adamw.h."""

    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    inv_sqrt_bias2: float
    eps: float
    grad_scale: float
    seed: int


class AdamScalarsStructure(ctypes.Structure):
    """`AdamScalars` as a C structure."""

    _fields_ = [
        (name, ctypes.c_uint32 if name == "seed" else ctypes.c_float)
        for name in AdamScalars._fields
    ]


def adam_scalars(hyper: AdamHyper) -> AdamScalars:
    """Return the scalars of one update; bias corrections are included."""
    return AdamScalars(
        decay=1.0 - hyper.lr * hyper.weight_decay,
        beta1=float(hyper.beta1),
        one_minus_beta1=1.0 - hyper.beta1,
        beta2=float(hyper.beta2),
        one_minus_beta2=1.0 - hyper.beta2,
        step_size=hyper.lr / (1.0 - hyper.beta1**hyper.step),
        inv_sqrt_bias2=1.0 / math.sqrt(1.0 - hyper.beta2**hyper.step),
        eps=float(hyper.eps),
        grad_scale=float(hyper.grad_scale),
        # the odd multiplier gives 2**32 distinct seeds and changes many bits from step to step
        seed=hyper.step * 0x9E3779B9 & 0xFFFFFFFF,
    )
