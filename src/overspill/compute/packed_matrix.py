"""A matrix of codes and scales, and its values."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from overspill.compute.formats import (
    E2M1,
    IQ4_NL,
    UNSIGNED,
    decode_e4m3,
    decode_e8m0,
    has_nan,
    scale_groups,
    subtract_groups,
    unpack_awq,
    unpack_bits,
    unpack_integers,
    unpack_nibbles,
)
from overspill.compute.gguf_kernel import unpack_k_native
from overspill.compute.packed_kernel import Plane, packed_args, repack_awq, unpack_rows
from overspill.core.packing import Kind, Scheme

_CHUNK = 1 << 20
"""Number of weights that are unpacked at once, which bounds temporary memory."""
_TRANSPOSED = (Kind.GPTQ, Kind.AWQ)
_ADD_ONE = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Parts:
    """The stored tensors of a packed matrix."""

    codes: Tensor
    scales: Tensor
    factor: Tensor | None = None
    """Factor of all scales. K-quants have one factor for each 256 columns, or two: of scales and of
    minimums."""
    zeros: Tensor | None = None
    """Codes that stand for zero. K-quants have minimums, whose products with the second factor are
    subtracted from the products of codes and scales."""
    indices: Tensor | None = None
    """The group of each column."""
    size: Tensor | None = None
    """Rows and columns."""
    high: Tensor | None = None
    """The bits of codes above the fourth."""


class BadPart(ValueError):
    """A field of `Parts` whose values cannot be used, and the reason."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part} {reason}")
        self.part, self.reason = part, reason


@dataclass(frozen=True)
class PackedMatrix:
    """Packing of a matrix [rows, columns]."""

    scheme: Scheme
    rows: int
    columns: int
    divides: bool = False
    """Scales are divided by the factor."""
    transposed: bool = False
    """The plain matrix has inputs as rows, which for stacks of MXFP4 is always so."""

    @property
    def is_transposed(self) -> bool:
        """Whether the plain matrix has inputs as rows."""
        return self.transposed or self.scheme.kind is Kind.MXFP4_STACK

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the plain matrix."""
        return (self.columns, self.rows) if self.is_transposed else (self.rows, self.columns)

    def by_rows(self, parts: Parts) -> "tuple[PackedMatrix, Parts]":
        """Return the same values in the layout of records: the codes of a row are neighbours, the
        first of them in the lowest bits, with a row of scales, and signed zero points if there are
        any. Only integers (of GPTQ and AWQ too) change."""
        bits, kind = self.scheme.bits, self.scheme.kind
        if parts.zeros is None or kind not in (Kind.INTEGERS, *_TRANSPOSED):
            return self, parts
        codes, scales = parts.codes, parts.scales
        if kind is Kind.AWQ:
            codes = _awq_rows(codes)
        elif kind is Kind.GPTQ:
            codes = codes.T.contiguous()
        if kind in _TRANSPOSED:
            scales = scales.T.contiguous()
        middle, dtype = 1 << bits - 1, torch.int8 if bits == 4 else torch.int16
        zeros = (self._zeros(parts.zeros) - middle).to(dtype)
        scheme = replace(self.scheme, kind=Kind.INTEGERS, zero_offset=0)
        return replace(self, scheme=scheme), Parts(codes, scales, parts.factor, zeros)

    def unpack(self, parts: Parts, out: Tensor, threads: int = 1) -> None:
        """Fill the plain matrix `out`, in its dtype, with `threads` threads on the CPU."""
        matrix, parts = self.by_rows(parts)
        out = out.T if self.is_transposed else out
        if not matrix._unpack_native(parts, out, threads):
            matrix._unpack_torch(parts, out)

    def _unpack_native(self, parts: Parts, out: Tensor, threads: int) -> bool:
        """Fill `out` with the C++ library; return False if it cannot."""
        if out.device.type != "cpu":
            return False
        if self.scheme.kind is Kind.K_QUANT:
            own = parts.codes, parts.high, parts.scales, parts.zeros, parts.factor
            return unpack_k_native(self.scheme.bits, own, out, threads)
        named = ((field.name, getattr(parts, field.name)) for field in fields(parts))
        tensors = {name: part.contiguous() for name, part in named if part is not None}
        planes = {name: Plane(part.data_ptr(), part.dtype) for name, part in tensors.items()}
        args = packed_args(self.scheme, self.rows, self.columns, self.divides, planes)
        return args is not None and unpack_rows(args, out, threads)

    def _unpack_torch(self, parts: Parts, out: Tensor) -> None:
        codes, scales = parts.codes, self._scales(parts)
        k_quant = self.scheme.kind is Kind.K_QUANT
        zeros = None if parts.zeros is None or k_quant else self._zeros(parts.zeros)
        minimums = self._minimums(parts) if k_quant else None
        row_block, group = self.scheme.block[0] or self.rows, self.scheme.block[1] or self.columns
        step = max(1, _CHUNK // self.columns)
        for begin in range(0, self.rows, step):
            rows = slice(begin, min(begin + step, self.rows))
            values = self._values(codes, rows, zeros is not None)
            if parts.high is not None:
                self._add_high_bits(values, parts.high[rows])
            if zeros is not None:
                subtract_groups(values, zeros[rows], group)
            of_rows = torch.arange(rows.start, rows.stop, device=out.device) // row_block
            scale_groups(values, scales[of_rows], group)
            if minimums is not None:
                subtract_groups(values, minimums[rows], group)
            out[rows].copy_(values)

    def _values(self, codes: Tensor, rows: slice, has_zeros: bool) -> Tensor:
        """Return the codes of some rows as numbers."""
        bits = self.scheme.bits
        match self.scheme.kind:
            case Kind.MXFP4_STACK:
                return unpack_nibbles(codes.view(self.rows, -1)[rows], E2M1)
            case Kind.E2M1:
                return unpack_nibbles(codes[rows].view(torch.uint8), E2M1)
            case Kind.E4M3:
                return decode_e4m3(codes[rows])
            case Kind.INT8:
                return codes[rows].float()
            case Kind.INTEGERS:
                values = unpack_integers(codes[rows], bits)
                return values if has_zeros else values.sub_(1 << bits - 1)
            case Kind.IQ4_NL:
                return unpack_nibbles(codes[rows], IQ4_NL)
            case Kind.K_QUANT:
                return unpack_nibbles(codes[rows], UNSIGNED)
            case Kind.BLOCKS:
                raise NotImplementedError("blocks of GGUF are read by models/huggingface/gguf")
        raise AssertionError(f"{self.scheme.kind} is not in rows")

    def _add_high_bits(self, values: Tensor, high: Tensor) -> None:
        """Add the high bits to codes. Codes of five bits begin at 0, codes of six bits at -32."""
        bits = self.scheme.bits - 4
        values.add_(unpack_bits(high, bits), alpha=16)
        if bits == 2:
            values.sub_(32)

    def _minimums(self, parts: Parts) -> Tensor | None:
        """Return the numbers that K-quants subtract from each group of columns."""
        if parts.zeros is None or parts.factor is None:
            return None
        groups = parts.zeros.unflatten(1, (parts.factor.shape[1], -1)).float()
        products: Tensor = groups * parts.factor[..., 1:].float()
        return products.flatten(1)

    def _scales(self, parts: Parts) -> Tensor:
        """Return the scales, with a row for each block of rows and a column for each group of
        columns."""
        stored = parts.scales
        of_bytes = stored.dtype in (torch.uint8, torch.float8_e8m0fnu)
        is_power = of_bytes and self.scheme.kind is not Kind.K_QUANT
        scales = decode_e8m0(stored) if is_power else stored.float()
        if self.scheme.kind is Kind.K_QUANT:
            assert parts.factor is not None
            groups = scales.unflatten(1, (parts.factor.shape[1], -1))
            products: Tensor = groups * parts.factor[..., :1].float()
            return products.flatten(1)
        if parts.factor is not None:
            factor = parts.factor.float()
            scales = scales / factor if self.divides else scales * factor
        if self.scheme.kind in _TRANSPOSED:
            return scales.T
        row_block, group = self.scheme.block[0] or self.rows, self.scheme.block[1] or self.columns
        return scales.reshape(-(-self.rows // row_block), -(-self.columns // group))

    def _zeros(self, stored: Tensor) -> Tensor:
        """Return the code that stands for zero in each row and group."""
        bits = self.scheme.bits
        match self.scheme.kind:
            case Kind.GPTQ:
                words = stored + _ADD_ONE[bits] if self.scheme.zero_offset else stored
                return unpack_integers(words, bits).T
            case Kind.AWQ:
                return unpack_awq(stored).T
            case Kind.INTEGERS if stored.dtype == torch.int32:
                return unpack_integers(stored.T, bits).T[: self.rows]
            case Kind.INTEGERS:
                return stored.float().view(self.rows, -1) + (1 << bits - 1)
        return stored.float().view(self.rows, -1)

    def check(self, parts: Parts) -> None:
        """Raises `BadPart` if values of the parts cannot be used."""
        if parts.size is not None and parts.size.tolist() != [self.rows, self.columns]:
            stored = [self.rows, self.columns]
            raise BadPart("size", f"is {parts.size.tolist()}, and the codes have {stored}")
        if parts.indices is not None:
            group = self.scheme.block[1] or self.columns
            if not torch.equal(parts.indices.long(), torch.arange(self.columns) // group):
                raise BadPart(
                    "indices",
                    "gives columns to groups in another order (act-order, desc_act), which is "
                    "not supported",
                )
        scales = self._scales(parts)
        minimums = self._minimums(parts) if self.scheme.kind is Kind.K_QUANT else None
        if not scales.isfinite().all() or (minimums is not None and not minimums.isfinite().all()):
            raise BadPart("scales", "has scales that are infinite or NaN")
        if self.scheme.kind is Kind.E4M3 and has_nan(parts.codes):
            raise BadPart("codes", "has codes that are NaN")


def _awq_rows(words: Tensor) -> Tensor:
    """Return [K, N / 8] words of AWQ as [N, K / 8] words whose first columns are in the lowest
    bits."""
    repacked = repack_awq(words)
    if repacked is not None:
        return repacked
    codes = unpack_awq(words).to(torch.uint8).T
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)
