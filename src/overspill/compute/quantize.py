"""Packs plain matrices: codes and scales whose products are near the weights.

- MXFP4: groups of 32 columns, scales of powers of two. Each group takes the one with the smaller
  squared error of two: that of the OCP specification, with which the largest weight is between 4
  and 8 and becomes 6 at most, and twice that.
- int4: groups of 32 columns, codes from -8 to 7, scales in bf16. Each group takes the scale with
  the smallest squared error of those that divide its largest magnitude by `_DIVISORS`.
- FP8: blocks of 128 rows and columns, e4m3. The largest magnitude of a block becomes 448.

The bits are the same on every machine, with and without a compiler: single operations of float32,
in a fixed order.
"""

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from overspill.compute.packed_matrix import Parts
from overspill.core.packing import Kind, Scheme
from overspill.hardware.native import load_library

log = logging.getLogger("overspill")

GROUP = 32
_BEST_ISA = -1
_CHUNK = 1 << 18
"""Number of weights that torch packs at once: they stay in the caches of a core."""
_DIVISORS = (7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5, 9.0)
"""Divisors of the largest magnitude: 7 cuts off nothing, larger ones cut off more and round less.
Repeated in quantize.cpp."""
_LEAST_SCALE = 2.0**-126
_E4M3_MAX = 448.0
_TOO_LARGE = 2.0**127
"""Magnitude from which on products of codes and scales would overflow."""


class BadWeight(ValueError):
    """A weight that cannot be packed."""


def quantize(weight: Tensor, scheme: Scheme) -> Parts:
    """Packs a matrix [N, K] in float32; groups must divide K. Raises `BadWeight`."""
    rows, columns = weight.shape
    if scheme.kind is Kind.E4M3:
        made = [_fp8(part) for part in weight.split(max(1, _CHUNK // columns // 128) * 128)]
        codes, scales = (torch.cat(parts) for parts in zip(*made, strict=True))
        return Parts(codes, scales)
    integers = scheme.kind is Kind.INTEGERS
    codes, scales = quantize_groups(weight.reshape(-1, GROUP), integers)
    scales = scales.view(rows, -1)
    if integers:
        return Parts(codes.view(rows, -1), scales, size=torch.tensor([rows, columns]))
    stacked = scheme.kind is Kind.MXFP4_STACK
    return Parts(codes.view((rows, -1, 16) if stacked else (rows, -1)), scales)


def quantize_groups(groups: Tensor, integers: bool, isa: int = _BEST_ISA) -> tuple[Tensor, Tensor]:
    """Return codes and scales of groups [n, 32]: bytes of two codes [n, 16] and exponents [n], or
    with `integers` words of eight codes, which have 8 added, [n, 4] and scales [n]. Tests select an
    instruction set with `isa`."""
    library = _native_library()
    if library is None:
        return quantize_groups_torch(groups, integers)
    n, groups = len(groups), groups.contiguous()
    codes = torch.empty(n, 4, dtype=torch.int32) if integers else torch.empty(n, 16).byte()
    scales = torch.empty(n, dtype=torch.bfloat16 if integers else torch.uint8)
    outs = codes.data_ptr(), scales.data_ptr()
    if not library.overspill_quantize(groups.data_ptr(), n, integers, *outs, isa):
        raise _bad_weight()
    return codes, scales


@functools.cache
def _native_library() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_name("quantize.cpp"), "quantize")
    if library is None:
        log.warning("weights are packed by torch, which is about thirty times slower")
        return None
    pointer, size, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.overspill_quantize.argtypes = [pointer, size, integer, pointer, pointer, integer]
    library.overspill_quantize.restype = integer
    return library


def quantize_groups_torch(groups: Tensor, integers: bool) -> tuple[Tensor, Tensor]:
    """Compute `quantize_groups` with operations of torch."""
    function = _int4 if integers else _mxfp4
    made = [function(part.T.contiguous()) for part in groups.split(_CHUNK // GROUP)]
    codes, scales = (torch.cat(parts) for parts in zip(*made, strict=True))
    return codes, scales


def _mxfp4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Pack groups [32, n] as MXFP4. Operations are between rows, which are long."""
    largest = _largest(groups, (0,))
    # the largest is in [2 ** (e - 1), 2 ** e), and between 4 and 8 in units of 2 ** (e - 3)
    lower = (torch.frexp(largest).exponent - 3).clamp_(min=-127)
    sizes = (groups * _power(-lower)).abs_()
    low, high = _round_e2m1(sizes), _round_e2m1(sizes / 2)
    takes_high = _squares(2 * high - sizes) < _squares(low - sizes)
    values = torch.where(takes_high, high, low)
    # 1.0 and 1.5 are the codes 2 and 3, and each doubling adds two
    codes = torch.where(values < 1, (2 * values).int(), (values.view(torch.int32) >> 22) - 252)
    codes |= groups.view(torch.int32) >> 31 & 8
    exponents = torch.where(largest > 0, lower + takes_high, 0) + 127
    return (codes[::2] | codes[1::2] << 4).to(torch.uint8).T, exponents.to(torch.uint8)


def _round_e2m1(sizes: Tensor) -> Tensor:
    """Return the nearest values of e2m1, at most 6; of two equally near ones, the value with an
    even code."""
    sizes = sizes.clamp(max=6)
    # the power of two below; neighbouring values differ by half of it, from 1 downwards by 0.5
    power = (sizes.clamp(min=1).view(torch.int32) & 0x7F800000).view(torch.float32)
    shift = power * (1.5 * 2**22)  # a sum with it has no bits below that difference
    return (sizes + shift) - shift


def _int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Pack groups [32, n] as int4."""
    largest = _largest(groups, (0,))
    unit = _power(-torch.frexp(largest).exponent.clamp_(-126, 126))  # no overflow of squares
    best, scales = torch.full_like(largest, torch.inf), largest
    for divisor in _DIVISORS:
        scale = (largest / divisor).bfloat16().float().clamp_(min=_LEAST_SCALE)
        rounded = (groups * (1 / scale)).round_().clamp_(-8, 7)
        error = _squares(rounded.mul_(scale).sub_(groups).mul_(unit))
        scales = torch.where(error < best, scale, scales)
        best = torch.minimum(error, best)
    codes = (groups * (1 / scales)).round_().clamp_(-8, 7).int() + 8
    places = codes.view(4, 8, -1)
    words = places[:, 0]
    for place in range(1, 8):
        words = words | places[:, place] << 4 * place
    return words.T, scales.bfloat16()


def _fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return [N, K] codes and [ceil(N / 128), ceil(K / 128)] scales of FP8."""
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = whole.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = (_largest(blocks, (1, 3)) / _E4M3_MAX).clamp_(min=_LEAST_SCALE)
    codes = (blocks / scales[:, None, :, None]).clamp_(-_E4M3_MAX, _E4M3_MAX)
    codes = codes.flatten(2).flatten(0, 1)[:rows, :columns]
    return codes.to(torch.float8_e4m3fn), scales


def _largest(weights: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the largest magnitudes over some dimensions."""
    largest = weights.abs().amax(dims)
    if not (largest < _TOO_LARGE).all():  # or NaN
        raise _bad_weight()
    return largest


def _bad_weight() -> BadWeight:
    return BadWeight("has weights that are infinite, NaN or beyond 2**127")


def _power(exponents: Tensor) -> Tensor:
    """Return 2 ** exponents, from -126 to 127."""
    return (exponents + 127 << 23).view(torch.float32)


def _squares(errors: Tensor) -> Tensor:
    """Return the sums of the squares [32, n], added in a fixed order."""
    total = errors * errors
    while (half := len(total) // 2) > 0:
        total = total[:half] + total[half:]
    return total[0]
