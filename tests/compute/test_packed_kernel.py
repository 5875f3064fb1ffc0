"""The C++ library unpacks matrices of every format, bit for bit."""

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
from tests.compute.packed import Packed, packed, part_names

pytestmark = needs_native


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int16 if values.dtype == BF16 else torch.int32)


def unpack(packed: Packed, out: Tensor, threads: int, isa: str) -> None:
    """As `PackedMatrix.unpack`, with a chosen instruction set, and never with torch operations."""
    matrix, parts = packed.matrix.in_rows(packed.parts)
    planes = {
        name: Plane(getattr(parts, name).data_ptr(), getattr(parts, name).dtype)
        for name in part_names(parts)
    }
    args = packed_args(matrix.scheme, matrix.rows, matrix.columns, matrix.divides, planes)
    assert args is not None
    assert unpack_rows(args, out.T if matrix.is_transposed else out, threads, isa)


@settings(max_examples=100)
@given(
    packed(),
    st.sampled_from(ISAS),
    st.sampled_from([FP32, BF16]),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_value_has_the_bits_of_the_product(
    packed: Packed, isa: str, dtype: torch.dtype, strided: bool, threads: int
) -> None:
    packed.matrix.check(packed.parts)
    rows, columns = packed.matrix.shape
    wide = torch.full((rows + 2, columns + 3), torch.nan, dtype=dtype)
    out = wide[1:-1, 2:-1] if strided else torch.full((rows, columns), torch.nan, dtype=dtype)
    unpack(packed, out, threads, isa)
    assert torch.equal(bits(out), bits(packed.plain.to(dtype)))
    if strided:
        out.fill_(torch.nan)
    assert wide.isnan().all(), "nothing is written beside the matrix"


@settings(max_examples=30)
@given(packed(), st.sampled_from([FP32, BF16]))
def test_torch_operations_give_the_same_bits(packed: Packed, dtype: torch.dtype) -> None:
    native, others = (torch.empty(packed.matrix.shape, dtype=dtype) for _ in range(2))
    packed.matrix.unpack(packed.parts, native)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_kernel, "cpu_library", lambda: None)
        packed.matrix.unpack(packed.parts, others)
    assert torch.equal(bits(native), bits(others))


@every_isa
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_code_and_every_power_of_two(isa: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]  # from 2**-127, which is subnormal
    halves = PackedMatrix(Scheme(Kind.E2M1, (1, None)), 255, 512)
    numbers = codes.where(codes & 127 != 127, 0).view(torch.float8_e4m3fn)
    bytes_ = PackedMatrix(Scheme(Kind.E4M3, (1, None), 8), 255, 256)
    for matrix, stored in ((halves, codes), (bytes_, numbers)):
        parts = Parts(stored, scales)
        expected = torch.empty(matrix.shape)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_matrix, "unpack_rows", lambda *_: False)
            matrix.unpack(parts, expected)
        assert float(expected.abs()[expected != 0].min()) < 1e-38
        out = torch.empty(matrix.shape, dtype=dtype)
        unpack(Packed(matrix, parts, expected), out, 2, isa)
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
