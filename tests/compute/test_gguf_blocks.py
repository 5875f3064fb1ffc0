"""Weights of blocks of GGUF are those of the package gguf, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.compute.gguf_blocks import SCHEMES, _empty_parts, take_apart, take_apart_torch
from overspill.compute.gguf_kernel import take_apart_native, unpack_k_native
from overspill.compute.packed_matrix import BadPart, PackedMatrix
from overspill.compute.record_format import stored_parts
from overspill.core.packing import Kind

FACTORS = {"MXFP4": (), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Positions of the float16 factors in a block; by default the beginning."""


def unpack(kind: str, blocks: np.ndarray, columns: int) -> torch.Tensor:
    matrix = PackedMatrix(SCHEMES[kind], len(blocks), columns)
    parts = take_apart(kind, torch.from_numpy(blocks))
    matrix.check(parts)
    out = torch.empty(matrix.shape)
    matrix.unpack(parts, out)
    return out


@pytest.mark.parametrize("kind", SCHEMES)
@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 20), n_blocks=st.integers(1, 3), seed=st.integers(0, 1 << 30))
def test_all_codes_and_all_finite_factors(kind: str, rows: int, n_blocks: int, seed: int) -> None:
    weights, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, n_blocks, nbytes), dtype=np.uint8)
    for at in FACTORS.get(kind, (0,)):
        infinite = blocks[..., at + 1] & 0x7C == 0x7C
        blocks[..., at + 1] &= np.where(infinite, 0xBF, 0xFF).astype(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] %= 255
    flat = blocks.reshape(rows, -1)
    with np.errstate(over="ignore"):  # of the largest codes and scales of MXFP4
        expected = gguf.dequantize(flat, gguf.GGMLQuantizationType[kind])
    if kind in ("Q4_K", "Q5_K") and not np.isfinite(expected).all():
        return
    # plus zero: gguf loses the sign of a negative zero of MXFP4
    found = (unpack(kind, flat, n_blocks * weights) + 0.0).numpy()
    assert np.array_equal(found.view(np.int32), (expected + 0.0).view(np.int32))


@pytest.mark.parametrize("isa", [0, -1])
@pytest.mark.parametrize("kind", SCHEMES)
def test_the_library_does_what_torch_does(kind: str, isa: int) -> None:
    weights, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(0).integers(0, 256, (3, 70, nbytes), dtype=np.uint8)
    for at in FACTORS.get(kind, (0,)):
        blocks[..., at + 1] &= 0xBB  # finite
    expected = take_apart_torch(kind, torch.from_numpy(blocks))
    found = _empty_parts(kind, 3, 70)
    planes = found.codes, found.high, found.scales, found.zeros, found.factor
    number = list(SCHEMES).index(kind)
    if not take_apart_native(number, torch.from_numpy(blocks), 210, planes, isa):
        pytest.skip("there is no compiler")
    mine, theirs = stored_parts(found), stored_parts(expected)
    assert mine.keys() == theirs.keys()
    for field, part in mine.items():
        assert (part.dtype, part.shape) == (theirs[field].dtype, theirs[field].shape)
        assert torch.equal(part.view(torch.uint8), theirs[field].view(torch.uint8)), field
    if SCHEMES[kind].kind is Kind.K_QUANT:
        matrix = PackedMatrix(SCHEMES[kind], 3, 70 * weights)
        for dtype in (torch.float32, torch.bfloat16):
            plain, out = torch.empty(matrix.shape, dtype=dtype), torch.empty(matrix.shape).to(dtype)
            matrix._unpack_torch(expected, plain)
            assert unpack_k_native(matrix.scheme.bits, planes, out, 3, isa)
            assert torch.equal(out, plain)


@pytest.mark.parametrize("kind", SCHEMES)
def test_infinite_factors_are_refused(kind: str) -> None:
    weights, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.full((2, nbytes), 1, np.uint8)
    at = FACTORS.get(kind, (0,))
    if at:
        blocks[1, at[-1] : at[-1] + 2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    else:
        blocks[1, 0] = 255
    with pytest.raises(BadPart, match="infinite or NaN"):
        unpack(kind, blocks, weights)
