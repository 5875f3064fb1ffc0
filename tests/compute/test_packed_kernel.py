"""The C++ library unpacks matrices of every format, bit for bit."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overspill.compute import packed_kernel, packed_matrix
from overspill.compute.packed_kernel import Plane, packed_args, unpack_rows
from overspill.compute.packed_matrix import PackedMatrix, Parts
from overspill.core.packing import Kind, Scheme
from tests.compute.groups import BF16, FP32, ISAS, every_isa, needs_native
from tests.compute.packed import FORMS, make_matrix

pytestmark = needs_native
every_form = pytest.mark.parametrize("name", FORMS)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int16 if values.dtype == BF16 else torch.int32)


def unpack(matrix: PackedMatrix, parts: Parts, out: Tensor, threads: int, isa: str) -> None:
    """Unpack like `PackedMatrix.unpack`, with a chosen instruction set, and never with torch
    operations."""
    matrix, parts = matrix.by_rows(parts)
    named = ((field.name, getattr(parts, field.name)) for field in fields(parts))
    tensors = {name: part.contiguous() for name, part in named if part is not None}
    planes = {name: Plane(part.data_ptr(), part.dtype) for name, part in tensors.items()}
    args = packed_args(matrix.scheme, matrix.rows, matrix.columns, matrix.divides, planes)
    assert args is not None
    assert unpack_rows(args, out.T if matrix.is_transposed else out, threads, isa)


@settings(max_examples=100)
@given(
    st.sampled_from(list(FORMS)),
    st.sampled_from(ISAS),
    st.sampled_from([FP32, BF16]),
    st.integers(1, 90),
    st.integers(1, 200),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_value_has_the_bits_of_the_product(
    name: str, isa: str, dtype: torch.dtype, rows: int, columns: int, strided: bool, threads: int
) -> None:
    scheme = FORMS[name].scheme
    rows = -(-rows // 8) * 8 if FORMS[name].zeros else rows  # zero points are in words
    if scheme.block[0] == 1:  # groups are whole, and words
        each = max(8, scheme.block[1] or 0) if scheme.kind is not Kind.E4M3 else scheme.block[1]
        columns = -(-columns // (each or 1)) * (each or 1)
    matrix, parts, plain = make_matrix(name, rows, columns, extreme=True)
    matrix.check(parts)
    height, width = matrix.shape
    wide = torch.full((height + 2, width + 3), torch.nan, dtype=dtype)
    out = wide[1:-1, 2:-1] if strided else torch.full((height, width), torch.nan, dtype=dtype)
    unpack(matrix, parts, out, threads, isa)
    assert torch.equal(bits(out), bits(plain.to(dtype)))
    if strided:
        out.fill_(torch.nan)
    assert wide.isnan().all(), "nothing is written beside the matrix"


@every_form
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_torch_operations_give_the_same_bits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, parts, plain = make_matrix(name, 24, 64, extreme=True)
    native, others = (torch.empty(matrix.shape, dtype=dtype) for _ in range(2))
    matrix.unpack(parts, native, threads=2)
    monkeypatch.setattr(packed_kernel, "cpu_library", lambda: None)
    matrix.unpack(parts, others)
    assert torch.equal(bits(native), bits(plain.to(dtype)))
    assert torch.equal(bits(native), bits(others))


@every_isa
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_code_and_every_power_of_two(isa: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]  # from 2**-127, which is subnormal
    halves = PackedMatrix(Scheme(Kind.E2M1, (1, None)), 255, 512)
    numbers = codes.where(codes & 127 != 127, 0).view(torch.float8_e4m3fn)
    whole = PackedMatrix(Scheme(Kind.E4M3, (1, None), 8), 255, 256)
    for matrix, stored in ((halves, codes), (whole, numbers)):
        parts, expected = Parts(stored, scales), torch.empty(matrix.shape)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_matrix, "unpack_rows", lambda *_: False)
            matrix.unpack(parts, expected)
        assert float(expected.abs()[expected != 0].min()) < 1e-38
        out = torch.empty(matrix.shape, dtype=dtype)
        unpack(matrix, parts, out, 2, isa)
        assert torch.equal(bits(out), bits(expected.to(dtype)))


def test_types_that_the_library_does_not_have_are_left_to_torch() -> None:
    matrix = PackedMatrix(Scheme(Kind.INT8, (1, None), 8), 3, 5)
    codes = torch.arange(15, dtype=torch.int8).view(3, 5)
    zeros = torch.tensor([[1.5], [2.0], [0.0]])
    out = torch.empty(3, 5)
    matrix.unpack(Parts(codes, torch.ones(3, 1), zeros=zeros), out)
    assert torch.equal(out, codes - zeros)
    double = torch.empty(3, 5, dtype=torch.float64)
    matrix.unpack(Parts(codes, torch.ones(3, 1)), double)
    assert torch.equal(double, codes.double())
