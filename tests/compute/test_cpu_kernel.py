"""Groups of experts on the CPU compared with float64, for each instruction set of this machine."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from overspill.compute import cpu_kernel
from overspill.compute.activation import Activation, Differentiated, Fused, clamped_gate
from overspill.compute.activation_form import Form, Function
from overspill.compute.cpu_kernel import (
    BackwardRows,
    ExpertRows,
    cpu_isa,
    kernel_backward,
    kernel_forward,
    max_kernel_rows,
    read_bandwidth,
    why_unsupported,
)
from overspill.core.experts import ExpertShape
from overspill.moe.state_dict import split_record
from tests.compute.activations import activation_oracle, every_form
from tests.compute.groups import (
    BF16,
    FP32,
    ISAS,
    KINDS,
    TOLERANCE,
    Group,
    Kind,
    Results,
    compute,
    every_dtype,
    every_isa,
    every_kind,
    needs_native,
    oracle,
    plain_weights,
)

# Around tiles of 16 rows and 32 columns and blocks of 128 hidden units; token rows on both sides of
# 4 (vectors instead of tiles), 32 and 48 (where dx is computed in another way).
SIZES = [
    (64, 160, (5, 0, 20)),
    (32, 32, (16,)),
    (160, 96, (33, 4, 64)),
    (33, 47, (1, 17, 3)),
    (300, 129, (2, 33)),
    (37, 256, (64, 0, 49, 48)),
    (1, 1, (2,)),
]


@needs_native
@every_isa
@every_dtype
@every_kind
@pytest.mark.parametrize(("d_model", "d_hidden", "counts"), SIZES)
def test_a_group_follows_float64(
    isa: str,
    dtype: torch.dtype,
    kind: Kind,
    d_model: int,
    d_hidden: int,
    counts: tuple[int, ...],
) -> None:
    group = Group.make(kind.shape(d_model, d_hidden), counts, dtype, form=kind.form)
    compute(group, isa).assert_near(oracle(group), 2 * TOLERANCE[dtype])


@needs_native
@settings(max_examples=40)
@given(
    st.sampled_from(ISAS or [""]),
    st.sampled_from([FP32, BF16]),
    st.sampled_from(list(KINDS)),
    st.one_of(st.integers(1, 70), st.sampled_from([32, 64, 96])),
    st.one_of(st.integers(1, 150), st.sampled_from([32, 128, 160])),
    st.lists(st.integers(0, 60), min_size=1, max_size=3),
)
def test_any_size_follows_float64(
    isa: str, dtype: torch.dtype, kind: str, d_model: int, d_hidden: int, counts: list[int]
) -> None:
    shape, form = KINDS[kind].shape(d_model, d_hidden), KINDS[kind].form
    group = Group.make(shape, tuple(counts), dtype, scale=0.3, form=form)
    compute(group, isa).assert_near(oracle(group), 2 * TOLERANCE[dtype])


@needs_native
@every_isa
@every_kind
def test_bf16_is_rounded_after_each_product_and_activation(isa: str, kind: Kind) -> None:
    group = Group.make(kind.shape(96, 160), (47,), BF16, form=kind.form)
    ours, usual, exact = compute(group, isa), with_rounding(group), oracle(group)
    ours.assert_near(usual, TOLERANCE[BF16])
    for name, mine in ours.named().items():
        error = (mine.double() - exact.named()[name]).norm()
        expected = (usual.named()[name] - exact.named()[name]).norm()
        assert 0.7 * expected <= error <= 1.3 * expected, name


def with_rounding(group: Group) -> Results:
    """One expert in float64, rounded to bf16 where a GPU stores results."""
    assert group.form is not None
    w_in, w_out, *biases = split_record(group.experts[0].record.double(), group.shape)
    if group.shape.transposed:
        w_in, w_out = w_in.T, w_out.T
    b_in, b_out = biases or (None, None)
    x, dy, weight = group.x.double(), group.dy.double(), group.row_weight.double()[:, None]
    h = round_bf16(F.linear(x, w_in, b_in)).requires_grad_()
    a = activation_oracle(h, group.form)
    da = round_bf16(dy @ w_out)
    (dh,) = torch.autograd.grad(a, h, da * weight)
    y = round_bf16(F.linear(round_bf16(a.detach()), w_out, b_out))
    drow_weight = (a.detach() * da).sum(-1)
    if b_out is not None:
        drow_weight += dy @ b_out
    return Results(y, round_bf16(round_bf16(dh) @ w_in), drow_weight)


@needs_native
@every_isa
@pytest.mark.parametrize("kind", ["clamped", "clamped with biases, transposed", "limited"])
def test_clamped_values_have_no_gradient(kind: str, isa: str) -> None:
    shape, form = KINDS[kind].shape(96, 140), KINDS[kind].form
    scale, limit = (0.8, 10) if form.function is Function.LIMITED else (0.6, 7)
    group = Group.make(shape, (40, 3), FP32, scale=scale, form=form)
    h = group.x.double() @ plain_weights(group.experts[0].record[None].double(), shape)[0][0].T
    assert 0.1 < (h.abs() > limit).double().mean() < 0.5
    compute(group, isa).assert_near(oracle(group), 2 * TOLERANCE[FP32])


def round_bf16(values: Tensor) -> Tensor:
    return values.to(BF16).double()


@needs_native
@every_isa
@every_dtype
@pytest.mark.parametrize("counts", [(140,), (2,), (1, 0, 9, 60)])
def test_any_number_of_threads_gives_the_same_bits(
    isa: str, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    # More threads make smaller tasks: from four tiles of weight rows down to half of one.
    group = Group.make(ExpertShape(192, 800, True), counts, dtype)
    alone = compute(group, isa, threads=1)
    alone.assert_near(oracle(group), 2 * TOLERANCE[dtype])
    for threads in (3, 16):
        compute(group, isa, threads).assert_equal(alone)


@needs_native
@every_isa
@every_dtype
def test_a_group_gives_the_same_bits_as_its_experts_alone(isa: str, dtype: torch.dtype) -> None:
    group = Group.make(ExpertShape(64, 224, False), (3, 64, 0, 17), dtype)
    together = compute(group, isa)
    for expert in group.experts:
        rows = slice(expert.start, expert.stop)
        alone = compute(replace(group, experts=[expert]), isa)
        for name, value in alone.named().items():
            assert torch.equal(value[rows], together.named()[name][rows]), name


@needs_native
def test_a_group_too_large_for_its_scratch_memory_is_divided() -> None:
    one = Group.make(ExpertShape(512, 2048, False), (48,), BF16)
    rows = one.x.repeat(50, 1), one.dy.repeat(50, 1), one.row_weight.repeat(50)
    experts = [ExpertRows(one.experts[0].record, i, i + 48) for i in range(0, 50 * 48, 48)]
    together = compute(Group(*rows, experts, one.shape))  # 75 MiB of shares of dx
    assert torch.equal(together.dx, compute(one).dx.repeat(50, 1))


@needs_native
@every_isa
@every_dtype
def test_rows_may_be_strided_and_records_unaligned(isa: str, dtype: torch.dtype) -> None:
    shape, n_rows = ExpertShape(64, 96, True), 21
    group = Group.make(shape, (n_rows,), dtype)
    expected = compute(group, isa)
    wide = torch.full((4, n_rows, 81), torch.nan, dtype=dtype)
    x, dy, y, dx = (wide[i, :, 3:67] for i in range(4))
    x.copy_(group.x)
    dy.copy_(group.dy)
    record = torch.empty(shape.numel + 1, dtype=dtype)[1:].copy_(group.experts[0].record)
    drow_weight = torch.empty(n_rows)
    args = [ExpertRows(record, 0, n_rows)], shape, 2, isa
    kernel_forward(x, y, *args)
    kernel_backward(BackwardRows(x, dy, group.row_weight, dx, drow_weight), *args)
    Results(y, dx, drow_weight).assert_equal(expected)
    outside = torch.ones(81, dtype=torch.bool)
    outside[3:67] = False
    assert wide[2:, :, outside].isnan().all(), "nothing is written beside the rows"


@needs_native
@every_isa
@every_dtype
@every_kind
def test_nan_stays_in_its_token_row(isa: str, dtype: torch.dtype, kind: Kind) -> None:
    group = Group.make(kind.shape(64, 96), (20,), dtype, form=kind.form)
    clean = compute(group, isa)
    group.x[7, 3] = torch.nan
    others = torch.arange(20) != 7
    expected = oracle(group)  # the derivative of ReLU is finite
    assert expected.y[7].isnan().all()
    for name, value in compute(group, isa).named().items():
        assert torch.equal(value[7].isnan(), expected.named()[name][7].isnan()), name
        assert torch.equal(value[others], clean.named()[name][others]), name


@needs_native
@every_isa
@every_dtype
def test_denormals_are_flushed_to_zero_only_in_the_kernel(isa: str, dtype: torch.dtype) -> None:
    # GELU of large negative values, and equally small weights
    shape = ExpertShape(64, 96, False)
    group = Group.make(shape, (3, 20), dtype, scale=2.0)
    for expert in group.experts:
        expert.record[shape.d_model : 3 * shape.d_model] = 1e-39
    tiny = torch.tensor([1e-40])
    compute(group, isa).assert_near(oracle(group), 2 * TOLERANCE[dtype])
    assert float(tiny * 1.0) > 0.0, "the caller's arithmetic is unchanged"


@needs_native
@every_isa
@every_form
def test_activations_are_exact_to_float32(isa: str, form: Form) -> None:
    shape = ExpertShape(1, 1, form.gated)
    x = torch.linspace(-12, 12, 20_001).unsqueeze(1)
    ones = torch.ones_like(x)
    group = Group(
        x, ones, ones[:, 0], [ExpertRows(torch.ones(shape.numel), 0, len(x))], shape, form
    )
    ours, exact = compute(group, isa), oracle(group)
    for mine, theirs, step in ((ours.y, exact.y, 2e-7), (ours.dx, exact.dx, 1e-6)):
        assert bool(((mine.double() - theirs).abs() <= step * theirs.abs().clamp(min=1.0)).all())


@needs_native
def test_concurrent_callers_with_pauses_do_not_disturb_each_other() -> None:
    # Workers spin for 50 us and then sleep: calls find them spinning, asleep and in between.
    groups = [Group.make(ExpertShape(64, 256, True), (n, 3), BF16) for n in (1, 40, 60)]
    expected = [compute(group, threads=1) for group in groups]

    def repeat(number: int) -> None:
        chance = random.Random(number)
        for _ in range(50):
            results = compute(groups[number], threads=chance.randint(1, 6))
            results.assert_equal(expected[number])
            time.sleep(chance.choice((0, chance.uniform(20e-6, 80e-6))))

    with ThreadPoolExecutor(3) as callers:
        list(callers.map(repeat, range(3)))


@pytest.mark.parametrize("threads", [1, 2])
def test_read_bandwidth_is_plausible(threads: int) -> None:
    assert 1e7 < read_bandwidth(torch.ones(1 << 20), threads) < 1e14


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernel, "cpu_library", lambda: None)
    assert cpu_isa() is None
    assert why_unsupported(BF16, ExpertShape(8, 8, False), None) == "no C++ compiler"
    assert max_kernel_rows(BF16, backward=False) == 0
    assert read_bandwidth(torch.ones(1000), threads=1) > 0


@needs_native
@pytest.mark.parametrize(
    ("shape", "dtype", "activation", "reason"),
    [
        (ExpertShape(8, 8, True), BF16, None, None),
        (ExpertShape(8, 8, True), FP32, Fused(True), None),
        (ExpertShape(8, 8, True), torch.float64, None, "float64"),
        (ExpertShape(8, 8, True, bias=True), FP32, Fused(True, Function.RELU), None),
        (ExpertShape(8, 8, True, transposed=True), FP32, Differentiated(clamped_gate), None),
        (
            ExpertShape(8, 8, False),
            FP32,
            Differentiated(torch.tanh, "tanh"),
            "tanh, which is not GELU, SiLU, ReLU",
        ),
        (ExpertShape(8, 8, False), FP32, Differentiated(nn.PReLU()), "the activation PReLU"),
    ],
)
def test_unsupported_experts_have_a_reason(
    shape: ExpertShape, dtype: torch.dtype, activation: Activation | None, reason: str | None
) -> None:
    found = why_unsupported(dtype, shape, activation)
    assert found is None if reason is None else found is not None and reason in found
