"""Packed matrices with random codes and scales, and their values by naive decoders."""

from collections.abc import Iterator
from typing import NamedTuple

import gguf
import torch
from torch import Tensor

from overspill.compute.gguf_blocks import SCHEMES, take_apart
from overspill.compute.packed_matrix import PackedMatrix, Parts
from overspill.compute.record_format import FormatBuilder, RecordFormat, stored_parts
from overspill.core.experts import ExpertShape
from overspill.core.packing import Kind, Scheme
from tests.models.huggingface.packed.naive import AWQ_COLUMNS, e2m1, e4m3, e8m0

E2M1 = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)
E4M3 = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)


class Form(NamedTuple):
    """Packing of a matrix, and the type of its scales."""

    scheme: Scheme
    scales: torch.dtype
    zeros: bool = False
    factor: str | None = None


FORMS = {
    "mxfp4": Form(Scheme(Kind.E2M1, (1, 32)), torch.uint8),
    "mxfp4-stack": Form(Scheme(Kind.MXFP4_STACK, (1, 32)), torch.uint8),
    "nvfp4": Form(Scheme(Kind.E2M1, (1, 16)), torch.float8_e4m3fn, factor="times"),
    "nvfp4-divided": Form(Scheme(Kind.E2M1, (1, 16)), torch.float8_e4m3fn, factor="divided"),
    "int4": Form(Scheme(Kind.INTEGERS, (1, 32)), torch.bfloat16),
    "int4-zeros": Form(Scheme(Kind.INTEGERS, (1, 16)), torch.float16, zeros=True),
    "int4-channel": Form(Scheme(Kind.INTEGERS, (1, None)), torch.float32),
    "awq": Form(Scheme(Kind.AWQ, (1, 32)), torch.float16, zeros=True),
    "gptq": Form(Scheme(Kind.GPTQ, (1, 32), 4, 1), torch.float16, zeros=True),
    "gptq-8": Form(Scheme(Kind.GPTQ, (1, 32), 8, 1), torch.float16, zeros=True),
    "int8": Form(Scheme(Kind.INT8, (1, None), 8), torch.float32),
    "fp8-block": Form(Scheme(Kind.E4M3, (10, 12), 8), torch.float32),
    "fp8-channel": Form(Scheme(Kind.E4M3, (1, None), 8), torch.bfloat16),
    "fp8-tensor": Form(Scheme(Kind.E4M3, (None, None), 8), torch.float32),
    "mxfp8": Form(Scheme(Kind.E4M3, (1, 32), 8), torch.uint8),
}

GGUF = {"IQ4_NL": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Types that only GGUF has, and where the factors of a block are in float16."""


def make_matrix(
    name: str, rows: int, columns: int, extreme: bool = False
) -> tuple[PackedMatrix, Parts, Tensor]:
    """A packed matrix as checkpoints have it, and its values in float32, as the plain one. With
    `extreme` some scales are the smallest and largest ones."""
    if name in GGUF:
        return _gguf_matrix(name, rows, columns)
    form = FORMS[name]
    scheme, kind, bits = form.scheme, form.scheme.kind, form.scheme.bits
    block = scheme.block[0] or rows, scheme.block[1] or columns
    grid = -(-rows // block[0]), -(-columns // block[1])
    scales, factors = _scales(form.scales, grid, extreme)
    factor = None
    if form.factor is not None:
        factor = torch.tensor([0.0123])
        factors = factors.float() * factor if form.factor == "times" else factors.float() / factor
        factors = factors.double()
    factors = factors.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    factors = factors[:rows, :columns]
    zeros = None
    if kind is Kind.E4M3:
        codes = torch.randint(0, 127, (rows, columns)) + 128 * torch.randint(0, 2, (rows, columns))
        values, codes = E4M3[codes], codes.to(torch.uint8).view(torch.float8_e4m3fn)
    elif kind is Kind.INT8:
        codes = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
        values = codes.double()
    else:
        codes = torch.randint(0, 1 << bits, (rows, columns))
        values = codes.double() - (1 << bits - 1)
        if form.zeros:
            zeros = torch.randint(0, (1 << bits) - scheme.zero_offset, grid)
            more = zeros + scheme.zero_offset
            values = codes - more.double().repeat_interleave(block[1], 1)
        if kind in (Kind.E2M1, Kind.MXFP4_STACK):
            values = E2M1[codes]
            codes = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        elif kind is Kind.INTEGERS:
            codes = _words(codes, bits)
            zeros = None if zeros is None else _words(zeros.T, bits).T.contiguous()
        else:
            turn = AWQ_COLUMNS if kind is Kind.AWQ else None
            codes = _words(codes.T, bits, turn) if turn else _words(codes, bits).T.contiguous()
            assert zeros is not None
            zeros, scales = _words(zeros.T, bits, turn), scales.T.contiguous()
    plain = (values * factors).float()
    matrix = PackedMatrix(scheme, rows, columns, divides=form.factor == "divided")
    if kind is Kind.MXFP4_STACK:
        codes, plain = codes.view(rows, -1, 16), plain.T
    return matrix, Parts(codes, scales, factor, zeros), plain


def _gguf_matrix(name: str, rows: int, columns: int) -> tuple[PackedMatrix, Parts, Tensor]:
    """Its values are those of the package gguf."""
    stored = gguf.GGMLQuantizationType[name]
    weights, nbytes = gguf.GGML_QUANT_SIZES[stored]
    blocks = torch.randint(0, 256, (rows, columns // weights, nbytes), dtype=torch.uint8)
    for at in GGUF[name]:
        factors = ((torch.rand(rows, columns // weights, 1) + 0.1) * 1e-3).half()
        blocks[..., at : at + 2] = factors.view(torch.uint8)
    flat = blocks.view(rows, -1)
    plain = torch.from_numpy(gguf.dequantize(flat.numpy(), stored))
    return PackedMatrix(SCHEMES[name], rows, columns), take_apart(name, flat), plain


def _scales(dtype: torch.dtype, grid: tuple[int, int], extreme: bool) -> tuple[Tensor, Tensor]:
    if dtype == torch.uint8:
        codes = torch.randint(120, 128, grid, dtype=torch.uint8)
        if extreme:
            codes.view(-1)[:4] = torch.tensor([0, 1, 2, 250])[: codes.numel()]
        return codes, torch.tensor([[e8m0(c) for c in row] for row in codes.tolist()]).double()
    scales = (torch.rand(grid) + 0.1).to(dtype)
    if extreme and dtype == torch.float8_e4m3fn:
        few = torch.tensor([0, 1, 7, 8, 126])
        scales.view(torch.uint8).view(-1)[:5] = few[: scales.numel()]
    elif extreme:
        info = torch.finfo(dtype)
        # the interpreter reads subnormal bf16 as zero
        small = info.tiny / (1 if dtype == torch.bfloat16 else 4)
        few = torch.tensor([0.0, small, info.tiny, info.max / 1024]).to(dtype)
        scales.view(-1)[:4] = few[: scales.numel()]
    return scales, scales.double()


def _words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[N, n] codes in int32, `order` says which of neighbouring columns is in which place."""
    each = 32 // bits
    parts = codes.reshape(len(codes), -1, each)[:, :, list(order or range(each))]
    return (parts << torch.arange(0, 32, bits)).sum(-1).to(torch.uint32).view(torch.int32)


class Packed(NamedTuple):
    """Records of packed experts, and their flat plain weights in float32."""

    format: RecordFormat
    records: Tensor
    plain: Tensor


def make_experts(
    name: str, shape: ExpertShape, count: int, split: bool = True, extreme: bool = False
) -> Packed:
    """Experts in the layout of a checkpoint; with `split` gate and up are two matrices."""
    records, plain, format = [], [], None
    for _ in range(count):
        builder, parts, flat = FormatBuilder(shape), [], []
        for tensor, rows, columns in _matrices(shape, split):
            matrix, stored, values = make_matrix(name, rows, columns, extreme)
            matrix, stored = matrix.by_rows(stored)
            builder.add(tensor, values.shape[0], matrix, stored_parts(stored))
            parts.append(stored_parts(stored))
            flat.append(values.reshape(-1))
        for tensor, size in enumerate(shape.sizes[2:], 2):
            bias = torch.randn(size).to(torch.bfloat16)
            builder.add(tensor, *size, None, {"codes": bias})
            parts.append({"codes": bias})
            flat.append(bias.float())
        format = builder.build()
        record = torch.zeros(format.nbytes, dtype=torch.uint8)
        for piece, stored_piece in zip(format.pieces, parts, strict=True):
            for field, part in stored_piece.items():
                piece.stored[field].of(record).copy_(part)
        records.append(record)
        plain.append(torch.cat(flat))
    assert format is not None
    return Packed(format, torch.stack(records), torch.stack(plain))


def _matrices(shape: ExpertShape, split: bool) -> Iterator[tuple[int, int, int]]:
    if shape.gated and split:
        yield 0, shape.d_hidden, shape.d_model
        yield 0, shape.d_hidden, shape.d_model
    else:
        yield 0, shape.in_rows, shape.d_model
    yield 1, shape.d_model, shape.d_hidden
