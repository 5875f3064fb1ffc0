"""Blocks of GGUF files, taken apart into codes, scales and so on, without loss.

A row of a weight is a row of blocks. In a block of 32 weights, byte j has the codes of weights j
(low four bits) and j + 16; in one of 256, byte j of each 32 has the codes of weights j and j + 32,
or j + 64.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from overspill.compute.gguf_kernel import take_apart_native
from overspill.compute.packed_matrix import Parts
from overspill.core.packing import Kind, Scheme

SCHEMES = {
    "Q8_0": Scheme(Kind.INT8, (1, 32), 8),
    "Q4_0": Scheme(Kind.INTEGERS, (1, 32)),
    "IQ4_NL": Scheme(Kind.IQ4_NL, (1, 32)),
    "MXFP4": Scheme(Kind.E2M1, (1, 32)),
    "Q4_K": Scheme(Kind.K_QUANT, (1, 32), 4),
    "Q5_K": Scheme(Kind.K_QUANT, (1, 32), 5),
    "Q6_K": Scheme(Kind.K_QUANT, (1, 16), 6),
}
"""Packing of the parts of each type."""
_SIZES = {"Q8_0": 34, "Q4_0": 18, "IQ4_NL": 18, "MXFP4": 17, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def take_apart(kind: str, rows: Tensor) -> Parts:
    """Return the parts of a weight from its stored bytes [N, bytes of a row]."""
    blocks = rows.view(len(rows), -1, _SIZES[kind])  # N rows of B blocks
    if rows.device.type == "cpu":
        parts = _empty_parts(kind, len(rows), blocks.shape[1])
        planes = parts.codes, parts.high, parts.scales, parts.zeros, parts.factor
        count = blocks.shape[0] * blocks.shape[1]
        if take_apart_native(list(SCHEMES).index(kind), blocks.contiguous(), count, planes):
            return parts
    return take_apart_torch(kind, blocks)


def take_apart_torch(kind: str, blocks: Tensor) -> Parts:
    """Return the parts of a weight from its blocks [N, B, bytes]."""
    return _TAKE_APART[kind](blocks)


def _empty_parts(kind: str, rows: int, n_blocks: int) -> Parts:
    """Return memory for the parts of so many blocks in each row."""

    def empty(count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(rows, count * n_blocks, dtype=dtype)

    match kind:
        case "Q8_0":
            return Parts(empty(32, torch.int8), empty(1, torch.float16))
        case "Q4_0":
            return Parts(empty(4, torch.int32), empty(1, torch.float16))
        case "IQ4_NL":
            return Parts(empty(16), empty(1, torch.float16))
        case "MXFP4":
            return Parts(empty(16), empty(1))
        case "Q6_K":
            factors = empty(1, torch.float16).view(rows, n_blocks, 1)
            return Parts(empty(128), empty(16, torch.int8), factors, high=empty(64))
    factors = empty(2, torch.float16).view(rows, n_blocks, 2)
    high = empty(32) if kind == "Q5_K" else None
    return Parts(empty(128), empty(8), factors, empty(8), high=high)


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(_join(blocks[..., 2:].view(torch.int8)), _halves(blocks[..., :2]))


def _q4_0(blocks: Tensor) -> Parts:
    codes = _pack(_two_halves(blocks[..., 2:]), 4)
    return Parts(codes.view(torch.int32), _halves(blocks[..., :2]))


def _iq4_nl(blocks: Tensor) -> Parts:
    return Parts(_pack(_two_halves(blocks[..., 2:]), 4), _halves(blocks[..., :2]))


def _mxfp4(blocks: Tensor) -> Parts:
    return Parts(_pack(_two_halves(blocks[..., 1:]), 4), _join(blocks[..., :1]))


def _q4_k(blocks: Tensor) -> Parts:
    scales, minimums = _k_scales(blocks[..., 4:16])
    codes = _two_halves(blocks[..., 16:].unflatten(-1, (4, 32)))
    return Parts(_pack(codes, 4), scales, _factors(blocks[..., :4]), minimums)


def _q5_k(blocks: Tensor) -> Parts:
    scales, minimums = _k_scales(blocks[..., 4:16])
    codes = _two_halves(blocks[..., 48:].unflatten(-1, (4, 32)))
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = blocks[..., None, 16:48] >> bits[:, None] & 1  # bit s of byte j: weight 32 s + j
    return Parts(_pack(codes, 4), scales, _factors(blocks[..., :4]), minimums, high=_pack(high, 1))


def _q6_k(blocks: Tensor) -> Parts:
    codes = _two_halves(blocks[..., :128].unflatten(-1, (2, 64)))
    bits = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> bits[:, None] & 3
    scales = _join(blocks[..., 192:208].view(torch.int8))
    return Parts(_pack(codes, 4), scales, _factors(blocks[..., 208:]), high=_pack(high, 2))


def _two_halves(codes: Tensor) -> Tensor:
    """Return the codes in the low four bits, and then in the high four bits, of each run of
    bytes."""
    return torch.stack((codes & 15, codes >> 4), dim=-2)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [N, …], in the order of the weights of a row, to [N, bytes], the first code in the
    lowest bits."""
    each = 8 // bits
    parts = codes.reshape(len(codes), -1, each)
    packed = parts[..., 0].clone()
    for at in range(1, each):
        packed |= parts[..., at] << at * bits
    return packed


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack scales and minimums of eight groups, each of six bits in twelve bytes."""
    first, second, third = packed.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return _join(scales), _join(minimums)


def _halves(scales: Tensor) -> Tensor:
    """Return the float16 in the bytes of each block."""
    return _join(scales).view(torch.float16)


def _factors(factors: Tensor) -> Tensor:
    """Return the one or two float16 in the bytes of each block, [N, B, 1 or 2]."""
    return factors.contiguous().view(torch.float16)


def _join(parts: Tensor) -> Tensor:
    """Return [N, B, n] as contiguous [N, B * n]."""
    return parts.reshape(len(parts), -1).contiguous()


_TAKE_APART: dict[str, Callable[[Tensor], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
