"""Dropout of token rows, by masks that are functions of a seed and of the position.

Whether an element is kept depends on a seed, on the assignment (the pair of a token and one of its
experts) whose row it is in, on its column, and on the place in the expert. So every computation of
a row has the same mask: in forward, in backward, and in a recomputation; in any wave, in any order
of rows, on any device. The random numbers are those of Philox4x32-10.

Shapes: R token rows, N columns.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.compute.activation import Activation, ActivationGrads
from overspill.hardware.native import has_triton

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ELEMENTS_AT_ONCE = 1 << 16
"""Elements of a mask that torch computes at once: their random numbers fit the caches of a core."""


class Site(IntEnum):
    """Position in an expert at which elements are dropped. Masks of different sites are
    independent."""

    HIDDEN = 0
    OUTPUT = 1


class Dropout(NamedTuple):
    """Dropout inside the experts of one pass through a layer."""

    seed: int
    hidden: float
    """Dropout rate between the activation and the second matrix."""
    output: float
    """Dropout rate of the weighted results, before the sums over the experts of a token."""

    @classmethod
    def draw(cls, hidden: float, output: float) -> "Dropout | None":
        """Return dropout with a seed from torch's default generator, which `torch.manual_seed` sets
        and checkpoints restore. If both rates are 0, return None and draw nothing."""
        if not hidden and not output:
            return None
        # in host memory: nothing waits for the device
        seed = torch.randint(1 << 62, (), dtype=torch.int64, device="cpu")
        return cls(int(seed), hidden, output)

    def of_rows(self, site: Site, assignment_R: Tensor) -> "RowDropout | None":
        """Return the dropout of some token rows at a site; None if nothing is dropped there."""
        rate = self.hidden if site is Site.HIDDEN else self.output
        return RowDropout(rate, self.seed, site, assignment_R) if rate else None


class RowDropout:
    """Dropout of some token rows at one site. Elements that are kept are divided by 1 - rate."""

    def __init__(self, rate: float, seed: int, site: Site, assignment_R: Tensor) -> None:
        self.rate, self.seed, self.site = rate, seed, site
        self._assignment_R = assignment_R
        self._mask: Tensor | None = None

    @property
    def scale(self) -> float:
        return 0.0 if self.rate == 1 else 1 / (1 - self.rate)

    @property
    def threshold(self) -> int:
        """Limit of random numbers of 32 bits: an element with a smaller number is dropped."""
        return round(self.rate * (1 << 32))

    def rows(self, rows: slice) -> "RowDropout":
        return RowDropout(self.rate, self.seed, self.site, self._assignment_R[rows])

    def apply(self, values_RN: Tensor, overwrite: bool) -> Tensor:
        """Return the values with zeros for dropped elements; with `overwrite` the result may be in
        their memory."""
        if _fused(values_RN):
            from overspill.compute.dropout_triton import drop

            args = self._assignment_R, self.seed, self.threshold, self.scale, int(self.site)
            return drop(values_RN, *args, overwrite)
        if self._mask is None or self._mask.shape != values_RN.shape:  # used twice in backward
            self._mask = self.mask(values_RN.shape[1])
        out = values_RN if overwrite else torch.empty_like(values_RN)
        torch.mul(values_RN, self.scale, out=out)
        return out.masked_fill_(~self._mask, 0)

    def mask(self, n_columns: int) -> Tensor:
        """Return whether each element is kept, [R, N], computed by torch with integers only."""
        mask_RN = torch.empty(
            len(self._assignment_R), n_columns, dtype=torch.bool, device=self._assignment_R.device
        )
        step = max(1, _ELEMENTS_AT_ONCE // max(1, n_columns))
        for start in range(0, len(mask_RN), step):
            numbers = philox(
                self.seed, self._assignment_R[start : start + step], n_columns, self.site
            )
            torch.ge(numbers, self.threshold, out=mask_RN[start : start + step])
        return mask_RN


class DroppedOut:
    """An activation with dropout after it."""

    def __init__(self, activation: Activation, dropout: RowDropout) -> None:
        self._activation, self._dropout = activation, dropout
        self.name = activation.name

    def forward(self, h: Tensor) -> Tensor:
        a_RH = self._activation.forward(h)
        own = a_RH.untyped_storage().data_ptr() != h.untyped_storage().data_ptr()
        return self._dropout.apply(a_RH, overwrite=own)

    def backward(
        self, h: Tensor, da_RH: Tensor, row_weight_R: Tensor, overwrite_h: bool
    ) -> ActivationGrads:
        da_RH = self._dropout.apply(da_RH, overwrite=True)
        grads = self._activation.backward(h, da_RH, row_weight_R, overwrite_h)
        # the gradient of the routing weight is right already: a row of it is a·da
        weighted_RH = self._dropout.apply(grads.weighted_RH, overwrite=True)
        return grads._replace(weighted_RH=weighted_RH)


def with_dropout(
    activation: Activation, dropout: RowDropout | None, rows: slice | None = None
) -> Activation:
    """Return the activation of a wave, or of some of its rows, with dropout after it."""
    if dropout is None:
        return activation
    return DroppedOut(activation, dropout if rows is None else dropout.rows(rows))


def philox(seed: int, row_R: Tensor, n_columns: int, site: int) -> Tensor:
    """Return random numbers of 32 bits, [R, N] in int64: Philox4x32-10 with `seed` as the key. The
    counter (n, row, site, 0) gives those of the columns n, Q + n, 2Q + n and 3Q + n, where Q is a
    quarter of the number of columns, rounded up."""
    quarter = -(-n_columns // 4)
    shape = len(row_R), quarter
    # products exceed 63 bits and wrap; their low and high words are the right ones
    c0 = torch.arange(quarter, device=row_R.device, dtype=torch.int64).expand(shape)
    c1 = (row_R.to(torch.int64) & _MASK).unsqueeze(1).expand(shape)
    c2, c3 = torch.full_like(c0, site), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(_ROUNDS):
        low, high = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0 = _upper(high).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = _upper(low).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = high.bitwise_and_(_MASK), low.bitwise_and_(_MASK)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return torch.cat((c0, c1, c2, c3), 1)[:, :n_columns]


def _upper(product: Tensor) -> Tensor:
    return (product >> 32).bitwise_and_(_MASK)


def _fused(values_RN: Tensor) -> bool:
    """Whether the kernel supports this tensor: on a GPU with Triton installed."""
    return (
        values_RN.is_cuda
        and values_RN.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and values_RN.numel() > 0
        and values_RN.is_contiguous()
        and has_triton("dropout in experts")
    )
