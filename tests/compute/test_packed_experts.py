"""Experts computed from their packed records, compared with float64 on their plain weights."""

import ctypes
import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute import cpu_kernel
from overspill.compute.activation_form import Form, Function
from overspill.compute.cpu_kernel import ExpertRows, GroupArgs, kernel_forward
from overspill.core.experts import ExpertShape
from overspill.core.packing import Kind, Scheme
from overspill.hardware.native import load_library
from tests.compute.activations import activation_oracle
from tests.compute.groups import BF16, FP32, ISAS, TOLERANCE, every_dtype, needs_native
from tests.compute.packed import FORMS, Packed, make_experts
from tests.compute.packed import Form as PackedForm
from tests.slow import slow_names

pytestmark = needs_native
CLAMPED = Form(Function.CLAMPED, True)
COUNTS = [(1, 0, 4), (2, 3, 1), (8, 5, 0), (9, 33, 2)]
"""On both sides of 4 (token rows that are multiplied at once) and of 8 (more are unpacked)."""

EMULATED = ["emulated avx512bf16"] if ISAS and ISAS[-1] == "avx512" else []
"""Slow, because a kernel is compiled for it. CPUs that have the instructions run the real one."""


@pytest.fixture(params=slow_names([*ISAS, *EMULATED], *EMULATED))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set; AVX512-BF16 is emulated if this CPU has AVX-512 but not it."""
    name = str(request.param)
    if name in EMULATED:
        source = Path(__file__).with_name("emulated_bf16.cpp")
        library = load_library(source, "cpu-experts-emulated")
        assert library is not None
        library.overspill_compute.argtypes = [ctypes.POINTER(GroupArgs)]
        library.overspill_compute.restype = None
        monkeypatch.setattr(cpu_kernel, "loaded_library", lambda: library)
        monkeypatch.setattr(cpu_kernel, "cpu_isa", lambda: "avx512bf16")
    return name.removeprefix("emulated ")


def compute(
    packed: Packed,
    x_RD: Tensor,
    counts: tuple[int, ...],
    isa: str | None,
    form: Form,
    threads: int = 2,
) -> Tensor:
    ends = itertools.pairwise([0, *itertools.accumulate(counts)])
    rows = zip(packed.records, ends, strict=True)
    experts = [ExpertRows(record, *place) for record, place in rows]
    y = torch.full_like(x_RD, torch.nan)
    shape = packed.format.shape
    kernel_forward(x_RD, y, experts, shape, threads, isa, form, packed.format)
    return y


def oracle(packed: Packed, x_RD: Tensor, counts: tuple[int, ...], form: Form) -> Tensor:
    shape, found = packed.format.shape, []
    for weights, x in zip(packed.plain.double(), x_RD.double().split(counts), strict=True):
        parts = weights.split([math.prod(size) for size in shape.sizes])
        w_in, w_out, *biases = (p.view(s) for p, s in zip(parts, shape.sizes, strict=True))
        if shape.transposed:
            w_in, w_out = w_in.T, w_out.T
        b_in, b_out = biases or (None, None)
        found.append(F.linear(activation_oracle(F.linear(x, w_in, b_in), form), w_out, b_out))
    return torch.cat(found)


def assert_near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((got.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())


@every_dtype
@pytest.mark.parametrize("name", FORMS)
def test_every_format_follows_float64(name: str, isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack = name == "mxfp4-stack"
    sizes = {
        "fp8-block": (36, 24),
        "fp8-tensor": (21, 9),
        "int8": (150, 33),
        "int4-channel": (72, 40),
    }
    shape = ExpertShape(*sizes.get(name, (160, 96)), True, bias=stack, transposed=stack)
    form = CLAMPED if stack else Form.usual(True)
    packed = make_experts(name, shape, 3, split=not stack)
    for counts in COUNTS:
        x = torch.randn(sum(counts), shape.d_model).to(dtype)
        got = compute(packed, x, counts, isa, form)
        assert_near(got, oracle(packed, x, counts, form), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["nvfp4", "int4-zeros", "mxfp8"])
@pytest.mark.parametrize(
    "form",
    [Form(Function.GELU, False), Form(Function.RELU, True), Form(Function.SILU, True)],
    ids=str,
)
def test_activations_and_biases_are_those_of_plain_experts(name: str, form: Form, isa: str) -> None:
    torch.manual_seed(1)
    packed = make_experts(name, ExpertShape(64, 192, form.gated, bias=True), 2)
    for counts in ((1, 2), (7, 12)):
        x = torch.randn(sum(counts), 64)
        got = compute(packed, x, counts, isa, form)
        assert_near(got, oracle(packed, x, counts, form), 2 * TOLERANCE[FP32])


def test_rows_of_gpt_oss_end_within_a_block(isa: str) -> None:
    torch.manual_seed(2)
    packed = make_experts("mxfp4-stack", ExpertShape(2880, 32, True, True, True), 1, split=False)
    x = torch.randn(3, 2880).to(BF16)
    got = compute(packed, x, (3,), isa, CLAMPED)
    assert_near(got, oracle(packed, x, (3,), CLAMPED), 2 * TOLERANCE[BF16])


@every_dtype
@pytest.mark.parametrize("block", [(24, 16), (128, 128)], ids=str)
def test_rows_share_scales(
    block: tuple[int, int], isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    monkeypatch.setitem(FORMS, "blocks", PackedForm(Scheme(Kind.E4M3, block, 8), FP32))
    packed = make_experts("blocks", ExpertShape(336, 200, True), 3)
    form = Form.usual(True)
    for counts in COUNTS:
        x = torch.randn(sum(counts), 336).to(dtype)
        got = compute(packed, x, counts, isa, form)
        assert_near(got, oracle(packed, x, counts, form), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["mxfp4", "int4-zeros", "fp8-block", "fp8-channel"])
def test_an_expert_does_not_depend_on_threads_rows_or_other_experts(name: str, isa: str) -> None:
    torch.manual_seed(3)
    packed = make_experts(name, ExpertShape(96, 320, True), 3)
    x = torch.randn(8, 96).to(BF16)
    form = Form.usual(True)
    few = (0, 1, 3) if isa == "amx" else (0, 1, 3, 5, 7)  # tiles compute more than four
    found = [
        compute(packed, torch.cat((x[:1], x[1 : 1 + more])), (1 + more, 0, 0), isa, form, threads)[
            0
        ]
        for more, threads in itertools.product(few, (1, 5))
    ]
    found.append(compute(packed, torch.cat((x[:1], x[2:6])), (1, 3, 1), isa, form)[0])
    assert all(torch.equal(each, found[0]) for each in found)


@every_dtype
def test_subnormal_codes_and_extreme_scales_count(isa: str, dtype: torch.dtype) -> None:
    # codes of e4m3 below 8 are subnormal; the largest scales are those of powers near 2**120
    torch.manual_seed(4)
    packed = make_experts("fp8-channel", ExpertShape(64, 64, False), 1)
    for piece in packed.format.pieces:
        codes = piece.stored["codes"].of(packed.records[0])
        codes.view(torch.uint8).bitwise_and_(0x87)
        scales = piece.stored["scales"].of(packed.records[0])
        scales.copy_(torch.where(torch.arange(64)[:, None] % 2 == 0, 2.0**60, 2.0**-60))
    out = torch.empty_like(packed.plain[0])
    packed.format.unpack(packed.records[0], out)
    plain = Packed(packed.format, packed.records, out[None])
    x, form = torch.randn(2, 64).to(dtype), Form(Function.RELU, False)
    got = compute(plain, x, (2,), isa, form)
    expected = oracle(plain, x, (2,), form)
    large = expected.abs() > 1e15
    assert large.any()
    for part in (large, ~large):
        error = (got.double() - expected)[part].abs().max()
        assert error <= 4 * TOLERANCE[dtype] * expected[part].abs().max()
