"""Groups of experts on the CPU against float64, on every path this machine has."""

import ctypes
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from overspill.compute import cpu
from overspill.compute.activation import Activation, Differentiated, Fused
from overspill.compute.cpu import (
    BEST_ISA,
    ISA_NAMES,
    Order,
    Runner,
    Segment,
    cpu_backward,
    cpu_forward,
    cpu_kernel_name,
    read_bandwidth,
)
from overspill.compute.experts import wave_backward, wave_forward
from overspill.core.experts import ExpertShape

BF16, FP32 = torch.bfloat16, torch.float32
# Of the largest value: float32 sums in another order; half a bf16 step of the result, and of each
# rounding before it that fell the other way.
TOLERANCE = {FP32: 1e-5, BF16: 2**-7}

ISAS = [] if cpu_kernel_name() == "torch" else list(range(ISA_NAMES.index(cpu_kernel_name()) + 1))
needs_native = pytest.mark.skipif(not ISAS, reason="no C++ compiler")
every_isa = pytest.mark.parametrize("isa", ISAS, ids=[ISA_NAMES[isa] for isa in ISAS])
every_dtype = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
gated_or_not = pytest.mark.parametrize("gated", [False, True], ids=["gelu", "gated"])

# Around tiles of 16 rows and 32 columns, blocks of 128 hidden units, chunks of 128 rows; rows on
# both sides of 48, where dx goes another way.
SIZES = [
    (64, 128, (5, 0, 20)),
    (32, 32, (16,)),
    (33, 47, (1, 17, 3)),
    (100, 300, (50, 70)),
    (300, 129, (2, 33)),
    (37, 256, (64, 0, 49, 48)),
    (1, 1, (2,)),
    (16, 3000, (9, 2)),
]


@dataclass
class Group:
    x: Tensor
    dy: Tensor
    row_weight: Tensor
    records: list[Tensor]
    segments: list[Segment]
    shape: ExpertShape

    @classmethod
    def make(
        cls,
        shape: ExpertShape,
        counts: tuple[int, ...],
        dtype: torch.dtype = FP32,
        scale: float = 0.1,
    ) -> "Group":
        n_rows = sum(counts)
        records = [(scale * torch.randn(shape.numel)).to(dtype) for _ in counts]
        borders = [0, *accumulate(counts)]
        return cls(
            torch.randn(n_rows, shape.d_model).to(dtype),
            torch.randn(n_rows, shape.d_model).to(dtype),
            torch.rand(n_rows),
            records,
            [Segment(r, *ends) for r, ends in zip(records, pairwise(borders), strict=True)],
            shape,
        )

    def wide(self) -> "Group":
        records = [record.double() for record in self.records]
        segments = [
            segment._replace(record=r) for segment, r in zip(self.segments, records, strict=True)
        ]
        rows = (self.x.double(), self.dy.double(), self.row_weight.double())
        return Group(*rows, records, segments, self.shape)


@dataclass
class Results:
    y: Tensor
    dx: Tensor
    drow_weight: Tensor
    gradients: list[Tensor]
    squares: list[float]

    def named(self) -> dict[str, Tensor]:
        rows = {"y": self.y, "dx": self.dx, "drow_weight": self.drow_weight}
        return rows | {f"gradient {i}": grad for i, grad in enumerate(self.gradients)}

    def assert_near(self, other: "Results", tolerance: float) -> None:
        for name, mine in self.named().items():
            theirs = other.named()[name].double()
            largest = max(1e-3, float_max(theirs))
            assert float_max(mine.double() - theirs) <= tolerance * largest, name

    def assert_equal(self, other: "Results") -> None:
        for name, mine in self.named().items():
            assert torch.equal(mine, other.named()[name]), name
        assert self.squares == other.squares


def float_max(values: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(values.abs().max()) if values.numel() else 0.0


def compute(
    group: Group,
    isa: int = BEST_ISA,
    threads: int = 2,
    frozen: bool = False,
    activation: Activation | None = None,
) -> Results:
    """By cpu_forward and cpu_backward, into memory full of NaN: everything must be written."""
    args = (group.segments, group.shape, activation, threads)
    y, dx = (torch.full_like(group.x, torch.nan) for _ in range(2))
    drow_weight = torch.full_like(group.row_weight, torch.nan)
    gradients = None if frozen else [torch.full_like(r, torch.nan) for r in group.records]
    cpu_forward(group.x, y, *args, isa=isa)
    squares = cpu_backward(
        group.x, group.dy, group.row_weight, dx, drow_weight, *args, gradients, isa=isa
    )
    return Results(y, dx, drow_weight, gradients or [], squares)


def by_waves(group: Group, frozen: bool = False, activation: Activation | None = None) -> Results:
    """The same by waves of one expert each."""
    results = Results(
        torch.empty_like(group.x),
        torch.empty_like(group.x),
        torch.empty(len(group.x), dtype=torch.float64),
        [],
        [],
    )
    for record, start, stop in group.segments:
        rows, n = slice(start, stop), stop - start
        args = (group.shape, torch.tensor([n], dtype=torch.int32), [n])
        own = record.unsqueeze(0)
        results.y[rows] = wave_forward(group.x[rows], own, *args, activation)[0]
        grads = wave_backward(
            group.x[rows],
            group.dy[rows],
            group.row_weight[rows],
            own,
            *args,
            activation=activation,
        )
        results.dx[rows] = grads.dx_RD
        results.drow_weight[rows] = grads.drow_weight_R.double()
        if not frozen:
            results.gradients.append(torch.cat([part.flatten() for part in grads.dw]))
    return results


@needs_native
@every_isa
@every_dtype
@gated_or_not
@pytest.mark.parametrize(("d_model", "d_hidden", "counts"), SIZES)
def test_a_group_follows_float64(
    isa: int,
    dtype: torch.dtype,
    gated: bool,
    d_model: int,
    d_hidden: int,
    counts: tuple[int, ...],
) -> None:
    group = Group.make(ExpertShape(d_model, d_hidden, gated), counts, dtype)
    for frozen in (False, True):
        expected = by_waves(group.wide(), frozen)
        compute(group, isa, frozen=frozen).assert_near(expected, 2 * TOLERANCE[dtype])


@needs_native
@every_isa
@gated_or_not
def test_bf16_is_rounded_where_waves_round(isa: int, gated: bool) -> None:
    group = Group.make(ExpertShape(96, 160, gated), (7, 40), BF16)
    ours, waves, exact = compute(group, isa), by_waves(group), by_waves(group.wide())
    ours.assert_near(waves, TOLERANCE[BF16])
    for name, mine in ours.named().items():
        error = (mine.double() - exact.named()[name]).norm()
        usual = (waves.named()[name].double() - exact.named()[name]).norm()
        assert 0.7 * usual <= error <= 1.3 * usual, name  # no rounding more, and none less


@needs_native
@every_isa
@every_dtype
@pytest.mark.parametrize("frozen", [False, True])
def test_any_number_of_threads_gives_the_same_bits(
    isa: int, dtype: torch.dtype, frozen: bool
) -> None:
    group = Group.make(ExpertShape(130, 400, True), (3, 0, 60, 17), dtype)
    alone = compute(group, isa, threads=1, frozen=frozen)
    for threads in (2, 3):
        compute(group, isa, threads, frozen).assert_equal(alone)


@needs_native
@every_isa
@every_dtype
@gated_or_not
@pytest.mark.parametrize("counts", [(140,), (2,), (4,), (1, 9)])
def test_tasks_of_any_height_give_the_same_bits(
    isa: int, dtype: torch.dtype, gated: bool, counts: tuple[int, ...]
) -> None:
    # With one thread and many rows, tasks of forward are four tiles high; with three, one or two.
    group = Group.make(ExpertShape(520, 1030, gated), counts, dtype)
    high = compute(group, isa, threads=1)
    high.assert_near(by_waves(group.wide()), 2 * TOLERANCE[dtype])
    for threads in (3, 16):
        compute(group, isa, threads).assert_equal(high)


@needs_native
@every_isa
@every_dtype
def test_a_group_gives_the_same_bits_as_its_experts_alone(isa: int, dtype: torch.dtype) -> None:
    group = Group.make(ExpertShape(70, 200, False), (3, 64, 0, 17), dtype)
    together = compute(group, isa)
    for number, segment in enumerate(group.segments):
        rows = slice(segment.start, segment.stop)
        alone = compute(replace(group, segments=[segment], records=[segment.record]), isa)
        for name in ("y", "dx", "drow_weight"):
            assert torch.equal(alone.named()[name][rows], together.named()[name][rows]), name
        assert torch.equal(alone.gradients[0], together.gradients[number])
        assert alone.squares == together.squares[number : number + 1]


@needs_native
def test_a_group_too_large_for_its_scratch_is_cut() -> None:
    group = Group.make(ExpertShape(512, 2048, False), (48,) * 50, BF16)  # 75 MiB of shares of dx
    frozen = compute(group, BEST_ISA, frozen=True)
    last = replace(group, segments=group.segments[-1:], records=group.records[-1:])
    alone = compute(last, BEST_ISA, frozen=True)
    assert torch.equal(frozen.dx[-48:], alone.dx[-48:])
    assert not frozen.dx.isnan().any()


@needs_native
@every_isa
@every_dtype
def test_squares_are_those_of_the_written_gradient(isa: int, dtype: torch.dtype) -> None:
    results = compute(Group.make(ExpertShape(48, 300, True), (9, 0, 60), dtype), isa)
    for square, gradient in zip(results.squares, results.gradients, strict=True):
        assert square == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)
    assert results.squares[1] == 0.0
    assert not results.gradients[1].any()


@needs_native
@every_isa
@every_dtype
def test_rows_and_records_may_lie_anywhere(isa: int, dtype: torch.dtype) -> None:
    shape, n_rows = ExpertShape(40, 70, True), 21
    group = Group.make(shape, (n_rows,), dtype)
    expected = compute(group, isa)
    wide = torch.full((6, n_rows, 57), torch.nan, dtype=dtype)  # rows further apart than D
    x, dy, y, dx = (wide[i, :, 3:43] for i in range(4))
    x.copy_(group.x)
    dy.copy_(group.dy)
    shifted = torch.empty(shape.numel + 1, dtype=dtype)[1:]
    record = shifted.copy_(group.records[0])
    args = ([Segment(record, 0, n_rows)], shape, None, 2)
    cpu_forward(x, y, *args, isa=isa)
    drow_weight = torch.empty(n_rows)
    gradient = torch.empty(shape.numel + 1, dtype=dtype)[1:]
    cpu_backward(x, dy, group.row_weight, dx, drow_weight, *args, [gradient], isa=isa)
    assert torch.equal(y, expected.y)
    assert torch.equal(dx, expected.dx)
    assert torch.equal(drow_weight, expected.drow_weight)
    assert torch.equal(gradient, expected.gradients[0])
    outside = torch.ones(57, dtype=torch.bool)
    outside[3:43] = False
    assert wide[2:4, :, outside].isnan().all()  # nothing written beside the rows


@needs_native
@every_isa
@every_dtype
@gated_or_not
def test_nan_stays_in_its_row(isa: int, dtype: torch.dtype, gated: bool) -> None:
    group = Group.make(ExpertShape(50, 90, gated), (20,), dtype)
    clean = compute(group, isa, frozen=True)
    group.x[7, 3] = torch.nan
    dirty = compute(group, isa, frozen=True)
    others = torch.arange(20) != 7
    for name, value in dirty.named().items():
        assert value[7].isnan().all(), name
        assert torch.equal(value[others], clean.named()[name][others]), name


@needs_native
@every_isa
@every_dtype
def test_numbers_too_small_are_zeros_and_only_in_the_kernel(isa: int, dtype: torch.dtype) -> None:
    # GELU of values far below zero, and weights that are as small.
    shape = ExpertShape(40, 70, False)
    group = Group.make(shape, (3, 20), dtype, scale=2.0)
    for record in group.records:
        record[shape.d_model : 3 * shape.d_model] = 1e-39
    tiny = torch.tensor([1e-40])
    compute(group, isa).assert_near(by_waves(group.wide()), 2 * TOLERANCE[dtype])
    assert float(tiny * 1.0) > 0.0  # the caller's own arithmetic is as it was


@needs_native
@every_isa
@gated_or_not
def test_activations_are_exact_to_float32(isa: int, gated: bool) -> None:
    shape = ExpertShape(1, 1, gated)
    x = torch.linspace(-12, 12, 20_001).unsqueeze(1)
    record = torch.ones(shape.numel)
    y = torch.empty_like(x)
    cpu_forward(x, y, [Segment(record, 0, len(x))], shape, None, 2, isa=isa)
    wide = x.double()
    expected = F.silu(wide) * wide if gated else F.gelu(wide)
    step = 2e-7 * expected.abs().clamp(min=1.0)
    assert bool(((y.double() - expected).abs() <= step).all())
    dx = torch.empty_like(x)
    ones, drow_weight = torch.ones_like(x), torch.empty(len(x))
    args = ([Segment(record, 0, len(x))], shape, None, 2)
    cpu_backward(x, ones, ones[:, 0], dx, drow_weight, *args, isa=isa)
    wide.requires_grad_()
    (F.silu(wide) * wide if gated else F.gelu(wide)).sum().backward()
    assert wide.grad is not None
    step = 1e-6 * wide.grad.abs().clamp(min=1.0)
    assert bool(((dx.double() - wide.grad).abs() <= step).all())


@needs_native
@given(
    st.sampled_from(ISAS or [0]),
    st.sampled_from([FP32, BF16]),
    st.booleans(),
    st.integers(1, 70),
    st.integers(1, 150),
    st.lists(st.integers(0, 60), min_size=1, max_size=3),
    st.booleans(),
)
def test_any_size_follows_float64(
    isa: int,
    dtype: torch.dtype,
    gated: bool,
    d_model: int,
    d_hidden: int,
    counts: list[int],
    frozen: bool,
) -> None:
    group = Group.make(ExpertShape(d_model, d_hidden, gated), tuple(counts), dtype, scale=0.3)
    ours = compute(group, isa, frozen=frozen)
    ours.assert_near(by_waves(group.wide(), frozen), 2 * TOLERANCE[dtype])


@needs_native
def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    groups = [Group.make(ExpertShape(64, 256, True), (n, 3), BF16) for n in (5, 40, 60)]
    expected = [compute(group) for group in groups]
    found: dict[int, Results] = {}

    def repeat(number: int) -> None:
        for _ in range(20):
            found[number] = compute(groups[number])
            found[number].assert_equal(expected[number])

    workers = [threading.Thread(target=repeat, args=(number,)) for number in range(len(groups))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number, results in found.items():
        results.assert_equal(expected[number])
    assert len(found) == len(groups)


@needs_native
def test_pauses_and_thread_counts_from_call_to_call_change_nothing() -> None:
    # Helpers look out for 50 us and then sleep: they are met awake, asleep and in between.
    group = Group.make(ExpertShape(64, 256, True), (1, 40), BF16)
    expected = compute(group, threads=1)

    def repeat(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(100):
            compute(group, threads=chance.randint(1, 6)).assert_equal(expected)
            until = time.perf_counter_ns() + chance.choice((0, chance.randint(30_000, 80_000)))
            while time.perf_counter_ns() < until:
                pass

    with ThreadPoolExecutor(2) as callers:
        list(callers.map(repeat, range(2)))


@needs_native
@every_dtype
def test_many_rows_go_to_torch_and_agree(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group.make(ExpertShape(32, 64, True), (10, 30), dtype)
    native = compute(group)
    calls = spy(monkeypatch, "wave_forward")
    monkeypatch.setattr(cpu, "_most_rows", lambda *_: 16)
    mixed = compute(group)
    assert calls == [30]
    mixed.assert_near(native, TOLERANCE[dtype])
    assert mixed.squares == pytest.approx(native.squares, rel=2e-2)
    assert torch.equal(mixed.y[:10], native.y[:10])


def spy(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The numbers of rows that `cpu` hands to torch."""
    rows: list[int] = []
    real: Callable[..., object] = getattr(cpu, name)

    def call(x: Tensor, *args: object) -> object:
        rows.append(len(x))
        return real(x, *args)

    monkeypatch.setattr(cpu, name, call)
    return rows


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log, as if nothing had been said before."""
    cpu._say_torch.cache_clear()
    with caplog.at_level(logging.WARNING, logger="overspill"):
        yield caplog
    cpu._say_torch.cache_clear()


FALLBACKS: dict[str, tuple[ExpertShape, Activation | None, str]] = {
    "bias": (ExpertShape(16, 32, True, bias=True), None, "biases"),
    "transposed": (ExpertShape(16, 32, True, transposed=True), None, "transposed"),
    "activation": (
        ExpertShape(16, 32, False),
        Differentiated(lambda h: h.relu().square()),
        "activations",
    ),
}


@needs_native
@pytest.mark.parametrize("kind", FALLBACKS)
def test_what_the_kernel_does_not_do_goes_to_torch_and_is_said_once(
    kind: str, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, activation, word = FALLBACKS[kind]
    group = Group.make(shape, (3, 0, 9))
    calls = spy(monkeypatch, "wave_forward")
    results = compute(group, activation=activation)
    compute(group, activation=activation)
    results.assert_near(by_waves(group.wide(), activation=activation), TOLERANCE[FP32])
    assert calls == [3, 0, 9] * 2
    assert [word in record.message for record in said.records] == [True]


@needs_native
def test_float64_goes_to_torch(said: pytest.LogCaptureFixture) -> None:
    group = Group.make(ExpertShape(16, 32, True), (3,)).wide()
    compute(group).assert_near(by_waves(group), 1e-12)
    assert "float64" in said.text


@needs_native
@gated_or_not
def test_fused_activation_is_what_the_kernel_computes(
    gated: bool, said: pytest.LogCaptureFixture
) -> None:
    group = Group.make(ExpertShape(16, 32, gated), (3,))
    compute(group, activation=Fused(gated)).assert_equal(compute(group))
    assert not said.records


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_library", lambda: None)
    group = Group.make(ExpertShape(16, 32, True), (3, 0, 9))
    results = compute(group)
    results.assert_near(by_waves(group.wide()), TOLERANCE[FP32])
    for square, gradient in zip(results.squares, results.gradients, strict=True):
        assert square == pytest.approx(float(gradient.square().sum()), rel=1e-5)
    assert cpu_kernel_name() == "torch"
    assert read_bandwidth(torch.ones(1000), threads=1) > 0


def test_frozen_backward_returns_no_squares() -> None:
    assert compute(Group.make(ExpertShape(16, 32, True), (3,)), frozen=True).squares == []


def test_a_group_without_experts_does_nothing() -> None:
    assert compute(Group.make(ExpertShape(16, 32, True), ())).squares == []


@pytest.mark.parametrize("threads", [1, 2])
def test_read_bandwidth_is_a_bandwidth(threads: int) -> None:
    assert 1e7 < read_bandwidth(torch.ones(1 << 20), threads) < 1e14


# -- the runner -------------------------------------------------------------------------------


class Desk:
    """A runner, the two flags, and a group of experts to compute."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        if cpu_kernel_name() == "torch":
            pytest.skip("there is no compiler, so no runner")
        self.shape = ExpertShape(24, 40, gated=True)
        generator = torch.Generator().manual_seed(3)
        records = torch.randn(3, self.shape.numel, generator=generator).mul_(0.1).to(dtype)
        self.segments = [Segment(records[i], 5 * i, 5 * i + 5) for i in range(3)]
        self.x = torch.randn(15, 24, generator=generator).to(dtype)
        self.dy = torch.randn(15, 24, generator=generator).to(dtype)
        self.weights = torch.rand(15, generator=generator)
        self.flags = torch.zeros(2, dtype=torch.int32)
        self.runner = Runner()

    def order(self, number: int) -> Order:
        there = self.flags.data_ptr()
        return Order(there, there + 4, number & 0xFFFFFFFF, (ctypes.c_int64 * 2)())

    def rows_are_there(self, number: int) -> None:
        self.flags[0] = number


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.runner.close()


def test_the_runner_computes_the_same_bits_once_its_rows_are_there(desk: Desk) -> None:
    expected, got = torch.empty_like(desk.x), torch.zeros_like(desk.x)
    cpu_forward(desk.x, expected, desk.segments, desk.shape, None, 2)
    order = desk.order(1)
    desk.runner.forward(desk.x, got, desk.segments, desk.shape, 2, order)
    time.sleep(0.02)
    assert not got.any(), "nobody said that the rows are there"
    desk.rows_are_there(1)
    assert desk.runner.wait(order)
    assert torch.equal(got, expected)
    start, end = order.times
    assert 0 < start <= end <= time.perf_counter_ns()


def test_the_runner_computes_backward_too(desk: Desk) -> None:
    tensors = desk.x, desk.dy, desk.weights
    expected, got = [(torch.zeros(15, 24), torch.zeros(15)) for _ in range(2)]
    cpu_backward(*tensors, *expected, desk.segments, desk.shape, None, 2)
    order = desk.order(1)
    desk.rows_are_there(1)
    desk.runner.backward(*tensors, *got, desk.segments, desk.shape, 2, order)
    assert desk.runner.wait(order)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("first", [1, -3])  # the second goes round
def test_orders_are_carried_out_one_after_another(desk: Desk, first: int) -> None:
    desk.flags.fill_(first - 1)
    outs = [torch.zeros_like(desk.x) for _ in range(6)]
    orders = [desk.order(first + i) for i in range(6)]
    for out, order in zip(outs, orders, strict=True):
        desk.runner.forward(desk.x, out, desk.segments, desk.shape, 3, order)
    for i, order in enumerate(orders):
        desk.rows_are_there(first + i)
        assert desk.runner.wait(order)
        assert outs[i].any()
        assert not any(out.any() for out in outs[i + 1 :])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_may_come_at_any_moment(dtype: torch.dtype, rows: int, threads: int) -> None:
    """Threads wait for 0.2 ms and then go away: before, meanwhile, just then, and after."""
    desk = Desk(dtype)
    delays = random.Random(rows + threads)
    segments = [
        Segment(part.record, rows * i, rows * (i + 1)) for i, part in enumerate(desk.segments)
    ]
    try:
        for number in range(1, 41):
            x = torch.zeros(3 * rows, 24, dtype=dtype)
            got, expected = torch.zeros_like(x), torch.empty_like(x)
            order = desk.order(number)
            desk.runner.forward(x, got, segments, desk.shape, threads, order)
            until = time.perf_counter() + delays.choice(
                [0, 1e-4, delays.uniform(1.8e-4, 2.4e-4), 2e-3]
            )
            while time.perf_counter() < until:
                pass
            x.copy_(torch.randn(x.shape))
            desk.rows_are_there(number)
            assert desk.runner.wait(order)
            cpu_forward(x, expected, segments, desk.shape, None, threads)
            assert torch.equal(got, expected)
    finally:
        desk.runner.close()


def test_a_runner_can_be_closed_while_it_waits_for_rows() -> None:
    desk = Desk()
    out = torch.zeros_like(desk.x)
    desk.runner.forward(desk.x, out, desk.segments, desk.shape, 2, desk.order(1))
    desk.runner.close()
    assert not out.any()


def test_the_runner_takes_what_the_kernel_is_faster_at() -> None:
    if cpu_kernel_name() == "torch":
        pytest.skip("there is no compiler, so no runner")
    shape = ExpertShape(8, 8, gated=False)
    kind = torch.bfloat16, shape, None
    assert Runner.takes([1, 8], *kind, backward=False)
    assert not Runner.takes([1, 100_000], *kind, backward=False)
    biased = ExpertShape(8, 8, gated=False, bias=True)
    assert not Runner.takes([1], torch.bfloat16, biased, None, backward=False)
