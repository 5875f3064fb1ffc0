"""The runner gives the bits of the direct calls, whenever its token rows become ready."""

import ctypes
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from overspill.compute.cpu_kernel import (
    BackwardRows,
    ExpertRows,
    cpu_isa,
    kernel_backward,
    kernel_forward,
)
from overspill.compute.runner import CpuRequest, Runner
from overspill.core.errors import EngineError
from overspill.core.experts import ExpertShape
from overspill.tiers.worker_sync import WorkerSync
from tests.clock import Clock
from tests.compute.groups import KINDS, Group, Results, compute, every_dtype
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler")


class Flags:
    """The two flags of a runner's requests."""

    def __init__(self) -> None:
        self._flags = torch.zeros(2, dtype=torch.int32)

    def request(self, number: int) -> CpuRequest:
        ready = self._flags.data_ptr()
        return CpuRequest(ready, ready + 4, number & 0xFFFFFFFF, (ctypes.c_int64 * 2)())

    def fill(self, number: int) -> None:
        self._flags.fill_(number)

    def set_ready(self, number: int) -> None:
        self._flags[0] = number

    def await_done(self, number: int) -> None:
        """Like a GPU, reads only the flag."""
        while int(self._flags[1]) != number:
            time.sleep(20e-6)


@pytest.fixture
def flags() -> Flags:
    return Flags()


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


@pytest.fixture
def group() -> Group:
    return Group.make(ExpertShape(64, 96, gated=True), (5, 5, 5))


def test_requests_wait_for_their_rows_and_give_the_same_bits(
    runner: Runner, flags: Flags, group: Group
) -> None:
    y, dx, drow_weight = torch.zeros_like(group.x), torch.zeros_like(group.x), torch.zeros(15)
    forward, backward = flags.request(1), flags.request(2)
    args = group.experts, group.shape, 2
    runner.forward(group.x, y, *args, forward)
    rows = BackwardRows(group.x, group.dy, group.row_weight, dx, drow_weight)
    runner.backward(rows, *args, backward)
    time.sleep(0.02)
    assert not y.any(), "the rows are not ready"
    flags.set_ready(1)
    assert runner.wait(forward)
    assert not dx.any(), "the rows of the second request are not ready"
    flags.set_ready(2)
    assert runner.wait(backward)
    Results(y, dx, drow_weight).assert_equal(compute(group))
    for request in (forward, backward):
        begin, end = request.times
        assert 0 < begin <= end <= time.perf_counter_ns()


@pytest.mark.parametrize("first", [1, -3])  # the second wraps around
def test_requests_are_computed_one_after_another(
    runner: Runner, flags: Flags, group: Group, first: int
) -> None:
    flags.fill(first - 1)
    outs = [torch.zeros_like(group.x) for _ in range(6)]
    requests = [flags.request(first + i) for i in range(6)]
    for out, request in zip(outs, requests, strict=True):
        runner.forward(group.x, out, group.experts, group.shape, 3, request)
    for i, request in enumerate(requests):
        flags.set_ready(first + i)
        assert runner.wait(request)
        assert outs[i].any()
        assert not any(out.any() for out in outs[i + 1 :])


@every_dtype
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_may_become_ready_at_any_moment(
    runner: Runner, flags: Flags, dtype: torch.dtype, count: int, threads: int
) -> None:
    """Threads spin for 0.2 ms and then sleep: rows become ready before, during and after that."""
    group = Group.make(ExpertShape(32, 64, True), (count,) * 3, dtype)
    chance = random.Random(count + threads)
    args = group.experts, group.shape, threads
    for number in range(1, 21):
        x = torch.zeros_like(group.x)
        got, expected = torch.zeros_like(x), torch.empty_like(x)
        request = flags.request(number)
        runner.forward(x, got, *args, request)
        moments = 0, 1e-4, chance.uniform(1.8e-4, 2.4e-4), 2e-3
        until = time.perf_counter() + chance.choice(moments)
        while time.perf_counter() < until:
            pass
        x.copy_(torch.randn(x.shape))
        flags.set_ready(number)
        assert runner.wait(request)
        kernel_forward(x, expected, *args)
        assert torch.equal(got, expected)


@every_dtype
@pytest.mark.parametrize("kind", ["gelu", "gated relu with biases"])
@pytest.mark.parametrize("count", [1, 20, 60])  # vectors, tiles, and more rows than share dx
def test_delayed_threads_neither_read_nor_write_after_done(
    flags: Flags, dtype: torch.dtype, kind: str, count: int
) -> None:
    """Like a GPU, the test overwrites the rows as soon as the flag is set."""
    shape, form = KINDS[kind].shape(32, 160), KINDS[kind].form
    group = Group.make(shape, (count, 0, count), dtype, form=form)
    chance = random.Random(count)
    runner = Runner(lambda _: time.sleep(chance.choice((0.0, 0.0, 1e-4, 1e-3))))
    x, dy, y, dx = (torch.zeros_like(group.x) for _ in range(4))
    drow_weight = torch.zeros_like(group.row_weight)
    rows = BackwardRows(x, dy, group.row_weight, dx, drow_weight)
    args = group.experts, group.shape
    for number in range(1, 7, 2):
        inputs = [torch.randn(x.shape).to(dtype) for _ in range(3)]
        x.copy_(inputs[0])
        runner.forward(x, y, *args, 4, flags.request(number), form)
        flags.set_ready(number)
        flags.await_done(number)
        x.copy_(inputs[1])
        dy.copy_(inputs[2])
        got_y = y.clone()
        y.zero_()
        runner.backward(rows, *args, 4, flags.request(number + 1), form)
        flags.set_ready(number + 1)
        flags.await_done(number + 1)
        x.fill_(torch.nan)
        dy.fill_(torch.nan)
        got = Results(got_y, dx.clone(), drow_weight.clone())
        dx.zero_()
        drow_weight.zero_()
        expected = Results(*(torch.empty_like(t) for t in (x, x, drow_weight)))
        kernel_forward(inputs[0], expected.y, *args, 1, form=form)
        tensors = *inputs[1:], group.row_weight, expected.dx, expected.drow_weight
        kernel_backward(BackwardRows(*tensors), *args, 1, form=form)
        got.assert_equal(expected)
        assert not any(t.any() for t in (y, dx, drow_weight)), "written after done"
    runner.close()
    assert not any(t.any() for t in (y, dx, drow_weight)), "written after done"


def test_a_failure_in_inject_completes_the_request_and_is_raised_once(
    flags: Flags, group: Group
) -> None:
    failures = iter([RuntimeError("injected")])

    def inject(where: str) -> None:
        assert where == "cpu"
        for failure in failures:
            raise failure

    runner, y, request = Runner(inject), torch.zeros_like(group.x), flags.request(1)
    runner.forward(group.x, y, group.experts, group.shape, 2, request)
    flags.set_ready(1)
    with pytest.raises(RuntimeError, match="injected"):
        runner.wait(request)
    assert torch.equal(y, compute(group).y)
    runner.check()
    assert runner.wait(request)
    runner.close()


def test_a_request_without_rows_is_done_when_it_is_ready(
    runner: Runner, flags: Flags, group: Group
) -> None:
    request = flags.request(1)
    experts = [ExpertRows(group.experts[0].record, 0, 0)]
    runner.forward(group.x, torch.empty_like(group.x), experts, group.shape, 2, request)
    time.sleep(0.005)
    assert request.times[1] == 0
    flags.set_ready(1)
    assert runner.wait(request)


def test_close_ends_a_runner_that_waits_for_rows_and_its_waiters(
    flags: Flags, group: Group
) -> None:
    runner, out, request = Runner(), torch.zeros_like(group.x), flags.request(1)
    runner.forward(group.x, out, group.experts, group.shape, 2, request)
    answers: list[bool] = []
    waiters = [
        threading.Thread(target=lambda: answers.append(runner.wait(request))) for _ in range(2)
    ]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.005)
    runner.close()
    for waiter in waiters:
        waiter.join(60)
    assert answers == [False, False]
    assert not runner.wait(request)
    assert not out.any()
    with pytest.raises(EngineError, match="closed"):
        runner.forward(group.x, out, group.experts, group.shape, 2, request)


@pytest.mark.parametrize("computed", [0, 1])
def test_a_wait_for_rows_that_never_become_ready_says_what_is_missing(
    computed: int, flags: Flags, group: Group
) -> None:
    clock = Clock(step=1)  # a second each time the watchdog looks
    runner, y = Runner(sync=WorkerSync(0.1, clock)), torch.zeros_like(group.x)
    flags.set_ready(computed)
    for number in range(1, computed + 2):
        runner.forward(group.x, y, group.experts, group.shape, 2, flags.request(number))
    with pytest.raises(EngineError, match=r"no progress .* CPU experts \(runner thread, .* rows\)"):
        runner.wait(flags.request(computed + 1))
    clock.step = 0
    flags.set_ready(computed + 1)
    assert runner.wait(flags.request(computed + 1))
    runner.close()


def test_a_slow_computation_is_progress(flags: Flags, group: Group) -> None:
    clock, limit = Clock(), 0.1

    def take_time(_: str) -> None:
        for _ in range(5):
            clock.seconds += limit / 20
            seen = clock.reads + 2  # the first of them may have read before the change
            wait_until(lambda seen=seen: clock.reads >= seen)

    runner = Runner(take_time, WorkerSync(limit, clock))
    y, request = torch.zeros_like(group.x), flags.request(1)
    flags.set_ready(1)
    runner.forward(group.x, y, group.experts, group.shape, 1, request)
    assert runner.wait(request)
    assert clock.seconds >= 2 * limit, "twice as long as the watchdog allows"
    runner.close()


def test_a_wait_ends_when_a_worker_thread_fails(flags: Flags, group: Group) -> None:
    sync = WorkerSync()
    runner, y, request = Runner(sync=sync), torch.zeros_like(group.x), flags.request(1)
    runner.forward(group.x, y, group.experts, group.shape, 2, request)
    threading.Timer(0.05, sync.fail, [OSError("no disk")]).start()
    with pytest.raises(EngineError, match="no disk"):
        runner.wait(request)
    runner.close()


def test_ctrl_c_ends_a_wait(runner: Runner, flags: Flags, group: Group) -> None:
    y, request = torch.zeros_like(group.x), flags.request(1)
    runner.forward(group.x, y, group.experts, group.shape, 2, request)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        runner.wait(request)
    flags.set_ready(1)
    assert runner.wait(request)
    assert torch.equal(y, compute(group).y)


def test_close_finishes_the_request_that_is_being_computed(flags: Flags, group: Group) -> None:
    started = threading.Event()

    def inject(_: str) -> None:
        started.set()
        time.sleep(0.002)

    runner, out, request = Runner(inject), torch.zeros_like(group.x), flags.request(1)
    flags.set_ready(1)
    runner.forward(group.x, out, group.experts, group.shape, 3, request)
    assert started.wait(60)
    runner.close()
    assert torch.equal(out, compute(group).y)


def test_a_forked_child_computes_with_a_runner_of_its_own(
    runner: Runner, flags: Flags, group: Group
) -> None:
    """It has none of the native threads, neither of the runner nor of the direct calls."""

    def forward(runner: Runner, number: int) -> torch.Tensor:
        y, request = torch.empty_like(group.x), flags.request(number)
        flags.set_ready(number)
        runner.forward(group.x, y, group.experts, group.shape, 3, request)
        assert runner.wait(request)
        return y

    def direct() -> torch.Tensor:
        y = torch.empty_like(group.x)
        kernel_forward(group.x, y, group.experts, group.shape, 3)
        return y

    y = forward(runner, 1)
    assert torch.equal(direct(), y)

    def child() -> None:
        if not torch.equal(direct(), y):
            os._exit(2)
        try:
            forward(runner, 2)
        except EngineError:
            runner.close()
            os._exit(0 if torch.equal(forward(Runner(), 2), y) else 3)
        os._exit(4)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 0, "it hangs" if code is None else f"exit code {code}"
    assert torch.equal(forward(runner, 2), y)
