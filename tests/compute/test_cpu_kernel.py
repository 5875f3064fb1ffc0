"""Groups of experts on the CPU against float64, on every path this machine has."""

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from overspill.compute.cpu import cpu_backward, cpu_forward
from overspill.compute.cpu_kernel import BEST_ISA, Segment, read_bandwidth
from overspill.core.experts import ExpertShape
from tests.compute.groups import (
    BF16,
    FP32,
    ISAS,
    TOLERANCE,
    Group,
    Results,
    by_waves,
    compute,
    every_dtype,
    every_isa,
    gated_or_not,
    needs_native,
)

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
    # The more threads, the lower the tasks: from four tiles down to one, or half of one.
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


@pytest.mark.parametrize("threads", [1, 2])
def test_read_bandwidth_is_a_bandwidth(threads: int) -> None:
    assert 1e7 < read_bandwidth(torch.ones(1 << 20), threads) < 1e14


FORK = """
import os, sys, torch
from overspill.compute.cpu import cpu_forward
from overspill.compute.cpu_kernel import Segment
from overspill.core.experts import ExpertShape

shape = ExpertShape(64, 256, gated=False)
record, x = torch.randn(shape.numel), torch.randn(4, 64)

def forward():
    y = torch.empty_like(x)
    cpu_forward(x, y, [Segment(record, 0, 4)], shape, None, 3)
    return y

y = forward()
child = os.fork()
if child == 0:  # without the threads that helped
    sys.exit(0 if torch.equal(forward(), y) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_native
def test_a_forked_child_computes_and_ends() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)
