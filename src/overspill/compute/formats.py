"""Codes and scales of packed weights as float32: the product of code and scale, rounded once.

Codes are of four bits (e2m1: MXFP4, NVFP4), of eight (e4m3: FP8, MXFP8), or integers. A group of
neighbouring codes in a row shares a scale; in FP8 a block of several rows may do so.
"""

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""Value of each code with one sign bit, two bits of exponent and one of mantissa."""
IQ4_NL = tuple(
    float(code)
    for code in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)
"""Value of each code of GGUF's IQ4_NL; the values are not evenly spaced."""
UNSIGNED = tuple(float(code) for code in range(16))


def unpack_nibbles(packed: Tensor, values: tuple[float, ...]) -> Tensor:
    """Decode [..., n] bytes of two codes each, the low four bits first, to [..., 2n] values."""
    byte = torch.arange(256, device=packed.device)
    of_code = torch.tensor(values, device=packed.device)
    pairs = torch.stack((of_code[byte & 15], of_code[byte >> 4]), 1).view(torch.int64).view(-1)
    found = pairs.index_select(0, packed.reshape(-1).int())
    return found.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


def decode_e4m3(codes: Tensor) -> Tensor:
    """Decode bytes of e4m3 to float32; the codes 127 and 255 are NaN."""
    every = torch.arange(256, dtype=torch.uint8, device=codes.device)
    values = every.view(torch.float8_e4m3fn).float()
    return values.index_select(0, _bytes(codes).reshape(-1).int()).view(codes.shape)


def has_nan(codes: Tensor) -> bool:
    """Return whether bytes of e4m3 contain the codes 127 or 255."""
    flat = _bytes(codes).contiguous().view(-1)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)  # eight codes at once
    carries = (words & 0x7F7F7F7F7F7F7F7F) + 0x0101010101010101
    rest = flat[words.numel() * 8 :]
    found = (carries & -0x7F7F7F7F7F7F7F80).any() or (rest & 127 == 127).any()
    return bool(found)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Decode bytes to powers of two: 2**(code - 127); the code 255 is NaN."""
    exponents = _bytes(codes).int()
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2**-127 is subnormal
    return torch.where(exponents == 255, torch.nan, bits.view(torch.float32))


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.element_size() == 1 else codes


def unpack_integers(words: Tensor, bits: int) -> Tensor:
    """Unpack [..., n] int32 of four codes of 8 bits or eight of 4 bits, the lowest bits first, to
    [..., 4n] or [..., 8n] integers from 0 on, as float32."""
    packed = words.reshape(-1).view(torch.uint8)  # little-endian
    codes = unpack_nibbles(packed, UNSIGNED) if bits == 4 else packed.float()
    return codes.view(*words.shape[:-1], -1)


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack [..., n] int32 of AWQ to [..., 8n] integers from 0 on, as float32. Of eight columns,
    the even ones are in the lower half of a word, the odd ones in the upper half."""
    codes = unpack_integers(words, 4)
    return codes.view(*words.shape, 2, 4).mT.reshape(codes.shape)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Unpack [..., n] bytes of codes of 1 or 2 bits, the first code in the lowest bits, to [..., n
    * 8 / bits] integers from 0 on, as float32."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> shifts & (1 << bits) - 1).flatten(-2).float()


def scale_groups(values: Tensor, scales: Tensor, group: int) -> None:
    """Multiplies each `group` columns of [N, K] by a column of `scales` [N, ceil(K / group)]."""
    whole = values.shape[1] // group * group
    for part, factors in _grouped(values, scales, group, whole):
        part.mul_(factors)


def subtract_groups(values: Tensor, zeros: Tensor, group: int) -> None:
    """Subtracts a column of `zeros` [N, ceil(K / group)] from each `group` columns of [N, K]."""
    whole = values.shape[1] // group * group
    for part, offsets in _grouped(values, zeros, group, whole):
        part.sub_(offsets)


def _grouped(values: Tensor, each: Tensor, group: int, whole: int) -> list[tuple[Tensor, Tensor]]:
    """Return views of all whole groups, and of the columns that remain, with the scales or zeros of
    each."""
    rows, n = len(values), whole // group
    parts = [(values[:, :whole].unflatten(1, (n, group)), each[:, :n, None])] if n else []
    if whole < values.shape[1]:
        parts.append((values[:, whole:].view(rows, 1, -1), each[:, n:, None]))
    return parts
