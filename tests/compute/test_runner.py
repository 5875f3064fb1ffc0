"""The runner gives the bits of `cpu_forward` and `cpu_backward`, whenever its rows come."""

import ctypes
import random
import time
from collections.abc import Iterator

import pytest
import torch

from overspill.compute.cpu import cpu_backward, cpu_forward
from overspill.compute.cpu_kernel import (
    BEST_ISA,
    Rows,
    Segment,
    cpu_kernel_name,
    delayed_tasks,
    kernel_backward,
    kernel_forward,
)
from overspill.compute.runner import Order, Runner
from overspill.core.errors import EngineError
from overspill.core.experts import ExpertShape
from tests.compute.groups import BF16


class Desk:
    """A runner, the two flags, and a group of experts to compute."""

    def __init__(self, dtype: torch.dtype = torch.float32, gated: bool = True) -> None:
        if cpu_kernel_name() == "torch":
            pytest.skip("there is no compiler, so no runner")
        self.shape = ExpertShape(24, 40, gated=gated)
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
    desk.runner.backward(Rows(*tensors, *got), desk.segments, desk.shape, 2, order)
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


def test_a_thread_that_loses_its_core_holds_nobody_up(desk: Desk) -> None:
    expected, got = torch.empty_like(desk.x), torch.zeros_like(desk.x)
    cpu_forward(desk.x, expected, desk.segments, desk.shape, None, 2)
    order = desk.order(1)
    desk.rows_are_there(1)
    lost = 2.0  # seconds
    with delayed_tasks(every=15, seconds=lost):  # of some 30 tasks
        begin = time.perf_counter()
        desk.runner.forward(desk.x, got, desk.segments, desk.shape, 3, order)
        assert desk.runner.wait(order)
        assert time.perf_counter() - begin > lost, "whoever waits may free the rows then"
    start, end = order.times
    assert end - start < 0.5 * lost * 1e9, "others did its task"
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("rows", [1, 5, 20, 60])  # by vectors, tiles, and more than share dx
@pytest.mark.parametrize("gated", [False, True])
def test_tasks_that_are_done_twice_change_no_bit(
    dtype: torch.dtype, rows: int, gated: bool
) -> None:
    """As a GPU would, the test writes other rows over these as soon as the flag is up, while
    somebody may still be at a task of theirs."""
    desk = Desk(dtype, gated)
    segments = [
        Segment(part.record, rows * i, rows * (i + 1)) for i, part in enumerate(desk.segments)
    ]
    segments.insert(1, Segment(desk.segments[0].record, rows, rows))  # an expert without tokens
    x, dy, y, dx = (torch.zeros(3 * rows, 24, dtype=dtype) for _ in range(4))
    weights, dweights = torch.rand(3 * rows), torch.zeros(3 * rows)
    kind = segments, desk.shape

    def await_flag(order: Order) -> None:
        desk.rows_are_there(order.number)
        while int(desk.flags[1]) != order.number:
            pass

    try:
        with delayed_tasks(every=9, seconds=0.01) as repeated:
            for number in range(1, 21, 2):
                forward_x, backward_x, backward_dy = (
                    torch.randn(x.shape).to(dtype) for _ in range(3)
                )
                first, second = desk.order(number), desk.order(number + 1)
                x.copy_(forward_x)
                desk.runner.forward(x, y, *kind, 4, first)
                await_flag(first)
                x.copy_(backward_x)
                dy.copy_(backward_dy)
                got_y = y.clone()
                y.zero_()
                desk.runner.backward(Rows(x, dy, weights, dx, dweights), *kind, 4, second)
                await_flag(second)
                x.fill_(torch.nan)
                dy.fill_(torch.nan)
                got = got_y, dx.clone(), dweights.clone()
                for tensor in (dx, dweights):
                    tensor.zero_()
                expected = torch.empty_like(x), torch.empty_like(x), torch.empty(3 * rows)
                kernel_forward(forward_x, expected[0], *kind, 1, BEST_ISA)
                tensors = Rows(backward_x, backward_dy, weights, *expected[1:])
                kernel_backward(tensors, *kind, 1, None, BEST_ISA)
                for mine, theirs in zip(got, expected, strict=True):
                    assert torch.equal(mine, theirs)
                assert desk.runner.wait(second)
                assert not any(tensor.any() for tensor in (y, dx, dweights)), "written too late"
            assert repeated() > 0
    finally:
        desk.runner.close()


def test_a_runner_can_be_closed_while_somebody_is_at_a_task_that_others_have_done(
    desk: Desk,
) -> None:
    got, order = torch.zeros_like(desk.x), desk.order(1)
    desk.rows_are_there(1)
    lost = 0.5
    with delayed_tasks(every=15, seconds=lost):
        begin = time.perf_counter()
        desk.runner.forward(desk.x, got, desk.segments, desk.shape, 3, order)
        while int(desk.flags[1]) != 1:
            pass
        desk.runner.close()
        assert time.perf_counter() - begin > lost, "it ends with its threads"


def test_a_runner_can_be_closed_while_it_waits_for_rows() -> None:
    desk = Desk()
    out = torch.zeros_like(desk.x)
    desk.runner.forward(desk.x, out, desk.segments, desk.shape, 2, desk.order(1))
    desk.runner.close()
    assert not out.any()


@pytest.mark.parametrize("seen", [False, True])
def test_a_closed_runner_takes_no_orders(seen: bool) -> None:
    desk = Desk()
    desk.runner.close()
    desk.rows_are_there(1 if seen else 0)
    out = torch.zeros_like(desk.x)
    with pytest.raises(EngineError, match="closed"):
        desk.runner.forward(desk.x, out, desk.segments, desk.shape, 2, desk.order(1))
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
