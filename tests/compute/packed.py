"""Random packed matrices of every format, and their values in Python's own numbers."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from overspill.compute.packed_matrix import PackedMatrix, Parts
from overspill.core.packing import Kind, Scheme
from tests.models.huggingface.packed.naive import (
    AWQ_COLUMNS,
    bytes_of,
    e2m1,
    e4m3,
    e8m0,
    nibble,
    product,
)

SCALES = {"E8M0": torch.uint8, "E4M3": torch.float8_e4m3fn} | {
    str(dtype): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)
}


@dataclass(frozen=True)
class Packed:
    """A matrix, what is stored of it, and its values."""

    matrix: PackedMatrix
    parts: Parts
    values: Tensor
    """float32 [rows, columns], rounded once."""

    @property
    def plain(self) -> Tensor:
        """The plain matrix."""
        return self.values.T if self.matrix.is_transposed else self.values


def numbers(random: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Finite numbers of any size and sign, also subnormal ones and zeros."""
    size = torch.empty((), dtype=dtype).element_size()
    bits = torch.from_numpy(random.integers(0, 256, (*shape, size), dtype=np.uint8))
    if dtype == torch.uint8:
        return bits.view(shape).clamp_(max=254)
    made = bits.view(dtype).view(shape)
    made = torch.where(made.float().isfinite(), made.float(), 1.0).to(dtype)
    flat = made.view(-1)
    flat[: len(flat) // 3] = (flat[: len(flat) // 3].float() * 0 + 0.37).to(dtype)  # usual ones
    return made


def scale_values(scales: Tensor) -> list[list[float]]:
    if scales.dtype == torch.uint8:
        return [[e8m0(code) for code in row] for row in scales.tolist()]
    if scales.dtype == torch.float8_e4m3fn:
        return [[e4m3(code) for code in row] for row in bytes_of(scales)]
    found: list[list[float]] = scales.double().tolist()
    return found


@st.composite
def packed(draw: Any) -> Packed:
    """Any format that checkpoints have, with partial blocks where these are possible."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    kind = draw(st.sampled_from(Kind))
    rows = draw(st.integers(1, 5)) * 8 if kind is Kind.AWQ else draw(st.integers(1, 40))
    group = draw(st.sampled_from([16, 32, 128, 8, 2]))
    dtype = SCALES[draw(st.sampled_from(list(SCALES)))]
    if kind is Kind.MXFP4_STACK:
        group, dtype = 32, torch.uint8
    columns = group * draw(st.integers(1, 1 + 70 // group))
    bits, block = 4, (1, draw(st.sampled_from([group, None])))
    if kind is Kind.MXFP4_STACK:
        block = 1, 32
    if kind in (Kind.GPTQ, Kind.AWQ, Kind.INTEGERS):
        columns = -(-columns // 8) * 8
        block = 1, block[1] if block[1] is None or block[1] % 8 == 0 else 8
        dtype = draw(st.sampled_from([torch.float16, torch.bfloat16]))
        bits = 4 if kind is Kind.AWQ else draw(st.sampled_from([4, 8]))
    if kind is Kind.GPTQ:
        rows = -(-rows // 8) * 8
    if kind in (Kind.E4M3, Kind.INT8):
        columns = draw(st.integers(1, 140))
        block = draw(st.sampled_from([(None, None), (1, None), (1, 32), (10, 12), (128, 128)]))
        bits = 8
    offset = draw(st.integers(0, 1)) if kind is Kind.GPTQ else 0
    scheme = Scheme(kind, block, bits, offset)
    row_block, group = block[0] or rows, block[1] or columns
    grid = -(-rows // row_block), -(-columns // group)
    high = {Kind.INTEGERS: 1 << bits, Kind.GPTQ: 1 << bits, Kind.INT8: 256, Kind.E4M3: 256}
    codes = torch.from_numpy(random.integers(0, high.get(kind, 16), (rows, columns)))
    if kind is Kind.E4M3:
        codes = torch.where(codes & 127 == 127, 0, codes)
    scales = numbers(random, dtype, grid)
    zeros = None
    if kind in (Kind.GPTQ, Kind.AWQ) or (kind is Kind.INTEGERS and draw(st.booleans())):
        # a stored zero point of one less must not be negative
        zeros = torch.from_numpy(random.integers(offset, 1 << bits, grid))
    factor, divides = None, False
    if dtype == torch.float8_e4m3fn and kind is Kind.E2M1:
        factor, divides = torch.tensor([random.uniform(1e-4, 10)]).float(), draw(st.booleans())
    parts = _stored(kind, bits, codes, scales, zeros, factor, offset)
    each = scale_values(scales)
    if factor is not None:
        one = np.float32(factor.item())
        each = [
            [float(np.float32(s) / one if divides else np.float32(s) * one) for s in row]
            for row in each
        ]
    plain = _values(kind, bits, codes, zeros, group)
    values = product(plain, lambda n, k: each[n // row_block][k // group])
    return Packed(PackedMatrix(scheme, rows, columns, divides), parts, values)


def _values(
    kind: Kind, bits: int, codes: Tensor, zeros: Tensor | None, group: int
) -> list[list[float]]:
    match kind:
        case Kind.MXFP4_STACK | Kind.E2M1:
            return [[e2m1(code) for code in row] for row in codes.tolist()]
        case Kind.E4M3:
            return [[e4m3(code) for code in row] for row in codes.tolist()]
        case Kind.INT8:
            return [[float(code - 128) for code in row] for row in codes.tolist()]
    if zeros is None:
        return [[float(code - (1 << bits - 1)) for code in row] for row in codes.tolist()]
    found = zeros.tolist()
    return [
        [float(code - found[n][k // group]) for k, code in enumerate(row)]
        for n, row in enumerate(codes.tolist())
    ]


def _words(codes: Tensor, bits: int) -> Tensor:
    """[n, k] codes as [n, ceil(k / each)] int32, the first one in the lowest bits."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
    places = torch.arange(each) * bits
    words = (padded.unflatten(1, (-1, each)) << places).sum(2)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def _stored(
    kind: Kind,
    bits: int,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    factor: Tensor | None,
    offset: int,
) -> Parts:
    rows = len(codes)
    match kind:
        case Kind.E2M1 | Kind.MXFP4_STACK:
            halves = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
            return Parts(halves.view(rows, -1, 16) if kind is Kind.MXFP4_STACK else halves,
                         scales, factor)  # fmt: skip
        case Kind.E4M3:
            return Parts(codes.to(torch.uint8).view(torch.float8_e4m3fn), scales)
        case Kind.INT8:
            return Parts((codes - 128).to(torch.int8), scales)
        case Kind.INTEGERS:
            stored = None if zeros is None else _words(zeros.T, bits).T.contiguous()
            return Parts(_words(codes, bits), scales, zeros=stored)
    assert zeros is not None
    if kind is Kind.GPTQ:
        words = _words(codes, bits).T.contiguous()
        return Parts(words, scales.T.contiguous(), zeros=_words(zeros.T - offset, bits))
    order = torch.tensor(AWQ_COLUMNS)
    turned = [each.T.unflatten(1, (-1, 8))[..., order].flatten(1) for each in (codes, zeros)]
    assert nibble(int(_words(turned[0], 4)[0, 0]), 1) == int(codes[2, 0])
    return Parts(_words(turned[0], 4), scales.T.contiguous(), zeros=_words(turned[1], 4))


def part_names(parts: Parts) -> set[str]:
    return {field.name for field in fields(parts) if getattr(parts, field.name) is not None}
