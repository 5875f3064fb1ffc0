"""The upload thread: records arrive whole, most urgent first, with little in flight."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from overspill.core.errors import EngineError
from overspill.transfer.upload_thread import (
    HostCalls,
    InFlightLimits,
    UploadCalls,
    UploadThread,
    upload_library,
)
from tests.interrupts import calls_of, interrupted
from tests.transfer.fake_calls import FakeCalls
from tests.waiting import wait_until

RECORD, PIECE, SLOTS, EXPERTS = 4096, 2048, 6, 8
LIMITS = InFlightLimits(expected=RECORD - PIECE, certain=3 * RECORD)

pytestmark = pytest.mark.skipif(upload_library() is None, reason="no C++ compiler")


class Upload(NamedTuple):
    """An expert for a slot, with the number of the command."""

    expert: int
    slot: int
    number: int
    certain: bool = False


class Bench:
    def __init__(self, calls: UploadCalls, inject: Callable[[], None] | None = None) -> None:
        self.experts = torch.arange(1, EXPERTS + 1, dtype=torch.uint8)[:, None].repeat(1, RECORD)
        self.slots = torch.zeros(SLOTS, RECORD, dtype=torch.uint8)
        self.errors: list[BaseException] = []
        self.thread = UploadThread(calls, SLOTS, RECORD, PIECE, inject, self.errors.append)

    def upload(self, *uploads: Upload, trace: bool = False) -> None:
        items = []
        for expert, slot, number, certain in uploads:
            command = self.thread.commands[slot]
            command.to = self.slots[slot].data_ptr()
            command.source = self.experts[expert].data_ptr()
            command.number, command.tag = number, expert
            items += [slot, certain]
        self.thread.set_uploads(items, LIMITS, trace)

    def wait_idle(self) -> None:
        while not self.thread.wait_idle():
            pass


class FakeBench(Bench):
    """Its copies arrive when the test says so."""

    def __init__(self, at_once: bool = False, code: int = 0) -> None:
        self.calls = FakeCalls(at_once, code)
        super().__init__(self.calls)

    def copied(self, count: int) -> list[tuple[int, int]]:
        """(expert, piece) of every copy that was issued, a moment after there are `count`: one too
        many would be seen."""
        wait_until(lambda: len(self.calls.sources) >= count)
        time.sleep(0.01)
        places = [source - self.experts.data_ptr() for source in self.calls.sources]
        return [(place // RECORD, place % RECORD // PIECE) for place in places]

    def drain(self) -> None:
        """Pieces arrive until all uploads were issued, and all of them have arrived."""
        issues = threading.Thread(target=self.wait_idle)
        issues.start()
        while issues.is_alive() or self.calls.work:
            if self.calls.work:
                self.calls.arrive()
            else:
                issues.join(1e-3)


@pytest.fixture
def bench() -> Iterator[FakeBench]:
    bench = FakeBench()
    yield bench
    bench.thread.close()


def test_expected_records_are_issued_in_pieces_with_one_record_in_flight(bench: FakeBench) -> None:
    bench.upload(Upload(0, 0, 1), Upload(1, 1, 2))
    assert bench.copied(2) == [(0, 0), (0, 1)]
    wait_until(lambda: bench.thread.issued[0])
    assert list(bench.thread.issued)[:2] == [1, 0]
    bench.calls.arrive()
    assert bench.copied(3) == [(0, 0), (0, 1), (1, 0)]
    assert bench.thread.arrival([0]) is not None
    bench.calls.arrive()
    assert bench.thread.arrival([0]) is None, "all pieces have arrived"
    assert (bench.slots[0] == 1).all()


def test_certain_records_are_issued_whole_and_further_ahead(bench: FakeBench) -> None:
    bench.upload(*(Upload(e, e, e + 1, certain=True) for e in range(6)))
    assert bench.copied(4) == [(e, 0) for e in range(4)], "until the limit is exceeded"
    bench.calls.arrive()
    assert len(bench.copied(5)) == 5


def test_an_urgent_upload_overtakes_and_the_other_continues_where_it_was(bench: FakeBench) -> None:
    bench.upload(Upload(0, 0, 1), Upload(1, 1, 2))
    bench.copied(2)
    bench.calls.arrive()
    assert bench.copied(3)[2:] == [(1, 0)]
    bench.upload(Upload(5, 5, 3), Upload(1, 1, 2))
    for _ in range(2):
        bench.calls.arrive()
    assert bench.copied(5)[3:] == [(5, 0), (5, 1)]
    bench.drain()
    assert bench.copied(6)[5:] == [(1, 1)], "only the piece that was missing"
    assert [int(bench.slots[s, 0]) for s in (0, 1, 5)] == [1, 2, 6]
    assert (bench.slots[1] == 2).all()


def test_a_new_number_begins_from_the_start(bench: FakeBench) -> None:
    bench.upload(Upload(0, 0, 1), Upload(1, 1, 2))
    bench.copied(2)
    bench.calls.arrive()
    assert bench.copied(3)[2:] == [(1, 0)]
    bench.upload(Upload(1, 1, 3))
    bench.drain()
    assert bench.copied(5)[3:] == [(1, 0), (1, 1)]


def test_an_issued_command_is_not_issued_again(bench: FakeBench) -> None:
    bench.upload(Upload(0, 0, 1))
    bench.wait_idle()
    bench.upload(Upload(0, 0, 1))
    assert bench.copied(2) == [(0, 0), (0, 1)]


def test_a_new_upload_takes_its_place_in_the_order(bench: FakeBench) -> None:
    bench.upload(Upload(0, 0, 1), Upload(2, 2, 2))
    bench.copied(2)
    bench.upload(Upload(0, 0, 1), Upload(1, 1, 3), Upload(2, 2, 2))
    bench.drain()
    assert bench.copied(6) == [(e, piece) for e in range(3) for piece in range(2)]


def test_the_first_piece_waits_for_the_last_reader_of_the_slot(bench: FakeBench) -> None:
    bench.thread.commands[0].after = 77
    bench.upload(Upload(0, 0, 1))
    wait_until(lambda: len(bench.calls.log) >= 5)
    assert [kind for kind, _ in bench.calls.log] == ["wait", "copy", "write", "copy", "write"]
    assert bench.calls.log[0][1] == (77,)


@pytest.mark.parametrize("every", [False, True])
def test_wait_returns_when_one_or_every_upload_was_issued(bench: FakeBench, every: bool) -> None:
    bench.upload(*(Upload(e, e, e + 1, certain=True) for e in range(6)))
    done = threading.Event()

    def wait() -> None:
        enough = all if every else any
        while not enough(bench.thread.issued[slot] == slot + 1 for slot in (3, 4)):
            bench.thread.wait([(3, 4), (4, 5)], every)
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    if every:
        assert not done.wait(0.05)
    else:
        assert done.wait(60)
    bench.calls.arrive()
    assert done.wait(60)


def test_a_driver_error_is_raised_by_every_later_call() -> None:
    bench = FakeBench(code=700)
    bench.upload(Upload(0, 0, 1))
    with pytest.raises(EngineError, match="700"):
        bench.wait_idle()
    with pytest.raises(EngineError, match="700"):
        bench.upload()
    bench.thread.close()


def test_closing_wakes_waiting_callers(bench: FakeBench) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            while True:
                bench.thread.wait([(5, 1)], every=True)
        except EngineError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.05)
    bench.thread.close()
    waiting.join(60)
    assert "closed" in str(errors)
    with pytest.raises(EngineError, match="closed"):
        bench.upload()
    assert bench.thread.take_traced() == ([], 0, 0)
    bench.thread.close()  # a second time has no effect


def test_a_forked_child_can_close_and_exit(bench: FakeBench) -> None:
    child = os.fork()
    if child == 0:
        bench.thread.take_traced()
        bench.thread.close()
        os._exit(7)
    deadline = time.monotonic() + 60
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.001)
    if found == (0, 0):
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(found[1]) == 7


def test_a_call_that_was_interrupted_anywhere_does_not_block_close() -> None:
    bench = FakeBench(at_once=True)
    for at in range(1, calls_of(bench.wait_idle) + 1):
        assert interrupted(bench.wait_idle, at)
    closing = threading.Thread(target=bench.thread.close, daemon=True)
    closing.start()
    closing.join(timeout=60)
    assert not closing.is_alive()


def test_traced_pieces_are_timed(bench: FakeBench) -> None:
    before = time.perf_counter_ns()
    bench.upload(Upload(3, 0, 1), trace=True)
    bench.copied(2)
    for _ in range(2):
        bench.calls.arrive(3)  # the write at its begin, the copy, the write at its end
    copies, size, _ = bench.thread.take_traced()

    def both() -> bool:  # the thread notes the end a bit later
        nonlocal copies, size
        more, bytes_issued, _ = bench.thread.take_traced()
        copies, size = copies + more, size + bytes_issued
        return len(copies) == 2

    wait_until(both)
    assert size == RECORD
    assert [(copy.tag, copy.bytes) for copy in copies] == [(3, PIECE)] * 2
    for copy in copies:
        assert before < copy.begin_ns <= copy.end_ns < time.perf_counter_ns()
    assert bench.thread.take_traced() == ([], 0, 0)


def test_fault_injection_runs_before_each_piece() -> None:
    seen: list[int] = []
    bench = Bench(HostCalls(), lambda: seen.append(int(bench.slots[0].sum())))
    bench.upload(Upload(1, 0, 1))
    bench.wait_idle()
    assert seen == [0, 2 * PIECE]
    assert (bench.slots[0] == 2).all()
    bench.thread.close()


def test_an_injected_failure_is_passed_on_and_no_piece_follows() -> None:
    failure = OSError("no link")

    def fail() -> None:
        raise failure

    bench = Bench(HostCalls(), fail)
    bench.upload(Upload(1, 0, 1), Upload(2, 1, 2))
    with pytest.raises(EngineError, match="no link") as caught:
        bench.wait_idle()
    assert caught.value.__cause__ is failure
    assert bench.errors == [failure], "once"
    assert not bench.slots.any()
    bench.thread.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("late", [False, True])
def test_after_any_requests_a_slot_holds_the_last(seed: int, late: bool) -> None:
    """Some requests are replaced by the next ones before all pieces were issued."""
    numbers = random.Random(seed)
    delays = random.Random(seed + 10)
    inject = (lambda: time.sleep(delays.random() * 1e-4)) if late else None
    bench, number = Bench(HostCalls(), inject), 0
    for _ in range(150):
        experts, slots = numbers.sample(range(EXPERTS), 4), numbers.sample(range(SLOTS), 4)
        uploads = []
        for expert, slot in zip(experts, slots, strict=True):
            number += 1
            uploads.append(Upload(expert, slot, number, numbers.random() < 0.5))
        bench.upload(*uploads)
        if numbers.random() < 0.3:
            continue
        bench.wait_idle()
        assert bench.thread.arrival(slots) is None
        for expert, slot in zip(experts, slots, strict=True):
            assert (bench.slots[slot] == expert + 1).all()
    bench.thread.close()
