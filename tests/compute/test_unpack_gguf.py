"""Experts of GGUF files unpacked by kernels, in Triton's interpreter and on a GPU, compared with
the package gguf bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from overspill.compute.gguf_blocks import SCHEMES, take_apart
from overspill.compute.packed_matrix import PackedMatrix
from overspill.compute.record_format import FormatBuilder, stored_parts
from overspill.core.experts import ExpertShape
from tests.compute.decode.near import needs_triton
from tests.compute.test_grouped_triton import every_device
from tests.slow import slow_rows

pytestmark = needs_triton

FACTORS = {"Q6_K": (208,), "IQ4_NL": (0,)}


@every_device
@pytest.mark.parametrize(
    ("kind", "transposed"),
    slow_rows([("IQ4_NL", False), ("Q4_K", True), ("Q5_K", False), ("Q6_K", False)], 1),
)
def test_kernels_unpack_the_values_of_the_package(kind: str, transposed: bool, device: str) -> None:
    from overspill.compute import unpack_triton

    shape = ExpertShape(256, 256, gated=False, bias=False, transposed=transposed)
    weights, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    records, plain = [], []
    for _ in range(3):
        builder, parts, values = FormatBuilder(shape), [], []
        for tensor in range(2):
            blocks = rng.integers(0, 256, (256, 256 // weights * nbytes), dtype=np.uint8)
            each = blocks.reshape(256, -1, nbytes)
            for at in FACTORS.get(kind, (0, 2)):
                each[..., at + 1] &= 0xBB  # finite
            scheme = SCHEMES[kind]
            matrix = PackedMatrix(scheme, 256, 256, transposed=transposed)
            parts.append(stored_parts(take_apart(kind, torch.from_numpy(blocks))))
            builder.add(tensor, 256, matrix, parts[-1])
            value = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
            values.append((value.T if transposed else value).reshape(-1))
        format = builder.build()
        record = torch.zeros(format.nbytes, dtype=torch.uint8)
        for piece, stored in zip(format.pieces, parts, strict=True):
            for field, part in stored.items():
                piece.stored[field].of(record).copy_(part)
        records.append(record)
        plain.append(torch.cat(values))
    assert unpack_triton.is_supported(format.pieces)
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        out = torch.full((3, shape.numel), -1.0, dtype=dtype, device=device)
        ends = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
        stacked = torch.stack(records).to(device)
        unpack_triton.unpack(format.shape, format.pieces, stacked, out, ends)
        for expert in (0, 2):
            assert torch.equal(out[expert].cpu(), plain[expert].to(dtype))
        assert (out[1] == -1).all()  # has no token rows
