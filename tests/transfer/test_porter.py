"""The porter: records arrive whole, most urgent first, with little on its way before it is sure."""

import ctypes
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from overspill.core.errors import EngineError
from overspill.transfer.driver import CallTable
from overspill.transfer.porter import Limits, Porter, porter_library

RECORD, PIECE, SLOTS, EXPERTS = 4096, 2048, 6, 8
GUESS, SURE = RECORD - PIECE, 3 * RECORD

pytestmark = pytest.mark.skipif(porter_library() is None, reason="no C++ compiler")

_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
)
_WRITE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint
)
_WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
_CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Want(NamedTuple):
    """An expert for a slot, by the number of an order."""

    expert: int
    slot: int
    number: int
    sure: bool = False


class FakeLink:
    """A stream whose work is done when the test says so, or at once."""

    pinned = False
    context = stream = None

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.code = 0
        self.work: deque[tuple[str, tuple[int, ...]]] = deque()
        self.log: list[tuple[str, tuple[int, ...]]] = []
        self._functions = (
            _CONTEXT(lambda _: 0),
            _COPY(lambda to, source, size, _: self._do("copy", to, source, size)),
            _WAIT(lambda _, event, flags: self._do("wait", event or 0)),
            _WRITE(lambda _, address, number, flags: self._do("write", address, number)),
        )
        self._table = CallTable(*(ctypes.cast(f, ctypes.c_void_p).value for f in self._functions))
        self.table = ctypes.addressof(self._table)

    def _do(self, kind: str, *args: int) -> int:
        self.log.append((kind, args))
        self.work.append((kind, args))
        if self.at_once:
            self.arrive(1)
        return self.code

    def arrive(self, steps: int = 2) -> None:
        """The next copy ends: it is carried out, and its number written."""
        for _ in range(steps):
            kind, args = self.work.popleft()
            if kind == "copy":
                ctypes.memmove(*args)
            elif kind == "write":
                ctypes.c_uint64.from_address(args[0]).value = args[1]

    def stream_waits(self, stream: object, address: int, number: int) -> None: ...


class Bench:
    def __init__(self, link: FakeLink) -> None:
        self.link = link
        self.experts = torch.arange(1, EXPERTS + 1, dtype=torch.uint8)[:, None].repeat(1, RECORD)
        self.slots = torch.zeros(SLOTS, RECORD, dtype=torch.uint8)
        self.porter = Porter(link, SLOTS, RECORD, PIECE)  # type: ignore[arg-type]

    def carry(self, *wanted: "Want", trace: bool = False) -> None:
        items = []
        for expert, slot, number, sure in wanted:
            order = self.porter.orders[slot]
            order.to = self.slots[slot].data_ptr()
            order.source = self.experts[expert].data_ptr()
            order.number, order.tag = number, expert
            items += [slot, sure]
        self.porter.carry(items, Limits(GUESS, SURE), trace)

    def copied(self) -> list[tuple[int, int]]:
        """(expert, half) of every copy that was issued, when nothing more is for now."""
        seen = -1
        while seen != len(self.link.log):
            seen = len(self.link.log)
            time.sleep(0.02)
        base = self.experts.data_ptr()
        places = [args[1] - base for kind, args in self.link.log if kind == "copy"]
        return [(place // RECORD, place % RECORD // PIECE) for place in places]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(FakeLink())
    yield bench
    bench.porter.close()


def test_guesses_go_in_halves_with_little_on_their_way(bench: Bench) -> None:
    bench.carry(Want(0, 0, 1), Want(1, 1, 2))
    assert bench.copied() == [(0, 0), (0, 1)]
    assert list(bench.porter.issued)[:2] == [1, 0]
    bench.link.arrive()
    assert bench.copied() == [(0, 0), (0, 1), (1, 0)]
    assert bench.porter.arrival([0]) is not None
    bench.link.arrive()
    assert bench.porter.arrival([0]) is None, "all of it has arrived"
    assert (bench.slots[0] == 1).all()


def test_what_is_sure_is_queued_whole_and_further_ahead(bench: Bench) -> None:
    bench.carry(*(Want(e, e, e + 1, sure=True) for e in range(6)))
    assert bench.copied() == [(e, 0) for e in range(4)], "a little more than is allowed"
    bench.link.arrive()
    assert len(bench.copied()) == 5


def test_the_urgent_overtakes_and_the_other_goes_on_where_it_was(bench: Bench) -> None:
    bench.carry(Want(0, 0, 1), Want(1, 1, 2))
    bench.copied()
    bench.link.arrive()
    assert bench.copied()[2:] == [(1, 0)]
    bench.carry(Want(5, 5, 3), Want(1, 1, 2))
    for _ in range(2):
        bench.link.arrive()
    assert bench.copied()[3:] == [(5, 0), (5, 1)]
    while bench.link.work:
        bench.link.arrive()
        bench.copied()
    assert bench.copied()[5:] == [(1, 1)], "the half that was missing, and not the other again"
    assert [int(bench.slots[s, 0]) for s in (0, 1, 5)] == [1, 2, 6]
    assert (bench.slots[1] == 2).all()


def test_a_new_number_begins_from_the_start(bench: Bench) -> None:
    bench.carry(Want(0, 0, 1), Want(1, 1, 2))
    bench.copied()
    bench.link.arrive()
    assert bench.copied()[2:] == [(1, 0)]
    bench.carry(Want(1, 1, 3))
    while bench.link.work:
        bench.link.arrive()
        bench.copied()
    assert bench.copied()[3:] == [(1, 0), (1, 1)]


def test_what_was_issued_is_not_carried_again(bench: Bench) -> None:
    bench.carry(Want(0, 0, 1))
    bench.porter.settle()
    bench.carry(Want(0, 0, 1))
    assert bench.copied() == [(0, 0), (0, 1)]


def test_what_becomes_ready_takes_its_place_in_the_order(bench: Bench) -> None:
    bench.carry(Want(0, 0, 1), Want(2, 2, 2))
    bench.copied()
    bench.carry(Want(0, 0, 1), Want(1, 1, 3), Want(2, 2, 2))
    while bench.link.work:
        bench.link.arrive()
        bench.copied()
    assert bench.copied() == [(e, half) for e in range(3) for half in range(2)]


def test_the_first_piece_waits_for_the_slots_last_reader(bench: Bench) -> None:
    bench.porter.orders[0].after = 77
    bench.carry(Want(0, 0, 1))
    bench.copied()
    assert [kind for kind, _ in bench.link.log] == ["wait", "copy", "write", "copy", "write"]
    assert bench.link.log[0][1] == (77,)


@pytest.mark.parametrize("every", [False, True])
def test_who_waits_goes_on_when_enough_was_issued(bench: Bench, every: bool) -> None:
    bench.carry(*(Want(e, e, e + 1, sure=True) for e in range(6)))
    done = threading.Event()

    def wait() -> None:
        enough = all if every else any
        while not enough(bench.porter.issued[slot] == slot + 1 for slot in (3, 4)):
            bench.porter.wait([(3, 4), (4, 5)], every)
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    assert done.wait(0.2) is not every
    bench.link.arrive()
    assert done.wait(10)


def test_an_error_of_the_driver_reaches_who_waits(bench: Bench) -> None:
    bench.link.code = 700
    bench.carry(Want(0, 0, 1))
    bench.copied()
    with pytest.raises(EngineError, match="700"):
        bench.porter.wait([(0, 1)], every=True)
    with pytest.raises(EngineError, match="700"):
        bench.carry()


def test_who_waits_is_told_that_it_was_closed(bench: Bench) -> None:
    told: list[BaseException] = []

    def wait() -> None:
        try:
            while True:
                bench.porter.wait([(5, 1)], every=True)
        except EngineError as error:
            told.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.05)
    bench.porter.close()
    waiting.join(10)
    assert "closed" in str(told)
    with pytest.raises(EngineError, match="closed"):
        bench.carry()
    assert bench.porter.take_lines() == ([], 0)
    bench.porter.close()  # once more does no harm


def test_a_forked_child_leaves_as_ever(bench: Bench) -> None:
    child = os.fork()
    if child == 0:
        bench.porter.take_lines()
        bench.porter.close()
        os._exit(7)
    deadline = time.monotonic() + 10
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if found == (0, 0):
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(found[1]) == 7


def test_pieces_are_timed_while_traced(bench: Bench) -> None:
    before = time.perf_counter_ns()
    bench.carry(Want(3, 0, 1), trace=True)
    bench.copied()
    for _ in range(2):
        bench.link.arrive(3)  # the write that it began, the copy, the write that it ended
        bench.copied()
    lines, size = bench.porter.take_lines()
    assert size == RECORD
    assert [(line.tag, line.bytes) for line in lines] == [(3, PIECE)] * 2
    for line in lines:
        assert before < line.begin_ns <= line.end_ns < time.perf_counter_ns()
    assert bench.porter.take_lines() == ([], 0)


@pytest.mark.parametrize("seed", range(3))
def test_in_any_order_of_orders_a_slot_ends_with_the_last(seed: int) -> None:
    numbers = random.Random(seed)
    bench, number = Bench(FakeLink(at_once=True)), 0
    for _ in range(200):
        experts, slots = numbers.sample(range(EXPERTS), 4), numbers.sample(range(6), 4)
        pairs = list(zip(experts, slots, strict=True))
        orders = []
        for expert, slot in pairs:
            number += 1
            orders.append(Want(expert, slot, number, numbers.random() < 0.5))
        bench.carry(*orders)
        if numbers.random() < 0.3:
            continue  # given up, perhaps half-way
        bench.porter.settle()
        assert bench.porter.arrival([slot for _, slot in pairs]) is None
        for expert, slot in pairs:
            assert (bench.slots[slot] == expert + 1).all()
    bench.porter.close()
