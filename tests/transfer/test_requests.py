"""Requests run by priority, can be dropped before they start, and fail loudly."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.transfer.requests import RequestQueue, RequestState


def no_error(error: BaseException) -> None:
    raise AssertionError(f"unexpected: {error!r}")


class Gate:
    """A queue of one worker that is busy until `open`."""

    def __init__(self, on_error: object = no_error) -> None:
        self.queue = RequestQueue("test", 1, on_error)  # type: ignore[arg-type]
        self._begun, self._open = threading.Event(), threading.Event()
        self.request = self.queue.submit("gate", (-1,), self._hold)
        assert self._begun.wait(10)

    def _hold(self) -> None:
        self._begun.set()
        assert self._open.wait(10)

    def open(self) -> None:
        self._open.set()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_the_most_urgent_runs_first_and_equals_in_order(priorities: list[tuple[int, int]]) -> None:
    gate, ran = Gate(), []
    for number, priority in enumerate(priorities):
        gate.queue.submit("job", priority, lambda n=number: ran.append(n))
    gate.open()
    gate.queue.wait_idle()
    assert ran == sorted(range(len(priorities)), key=lambda number: priorities[number])
    gate.queue.close()


@settings(max_examples=40)
@given(st.lists(st.booleans(), max_size=10))
def test_what_is_dropped_before_it_starts_never_runs(kept: list[bool]) -> None:
    gate, ran = Gate(), []
    requests = [gate.queue.submit("job", (0,), lambda n=n: ran.append(n)) for n in range(len(kept))]
    for request, keep in zip(requests, kept, strict=True):
        if not keep:
            assert gate.queue.drop(request)
            assert not gate.queue.drop(request), "dropped twice"
    gate.open()
    gate.queue.wait_idle()
    assert ran == [number for number, keep in enumerate(kept) if keep]
    states = [RequestState.DONE if keep else RequestState.DROPPED for keep in kept]
    assert [request.state for request in requests] == states
    gate.queue.close()


def test_what_runs_or_is_done_cannot_be_dropped() -> None:
    gate = Gate()
    assert gate.request.state is RequestState.RUNNING
    assert not gate.queue.drop(gate.request)
    gate.open()
    gate.queue.wait_idle()
    assert not gate.queue.drop(gate.request)
    assert gate.request.state is RequestState.DONE
    gate.queue.close()


def test_an_error_is_told_and_stops_nothing_else() -> None:
    errors: list[BaseException] = []
    gate, ran = Gate(errors.append), []

    def fail() -> None:
        raise OSError("broken")

    request = gate.queue.submit("job", (0,), fail)
    gate.queue.submit("job", (1,), lambda: ran.append("after"))
    gate.open()
    gate.queue.wait_idle()
    assert ran == ["after"]
    assert [str(error) for error in errors] == ["broken"]
    assert request.state is RequestState.DONE
    gate.queue.close()


def test_closing_finishes_what_is_queued_and_ends_the_threads() -> None:
    queue, done = RequestQueue("drained", 3, no_error), []
    for number in range(20):
        queue.submit("job", (number,), lambda n=number: (time.sleep(0.001), done.append(n)))
    queue.close()
    assert sorted(done) == list(range(20))
    assert not [t for t in threading.enumerate() if t.name.startswith("overspill-drained")]
    with pytest.raises(AssertionError, match="after close"):
        queue.submit("job", (0,), lambda: None)


def test_jobs_run_side_by_side() -> None:
    queue, both = RequestQueue("pair", 2, no_error), threading.Barrier(2)
    for _ in range(2):
        queue.submit("job", (0,), lambda: both.wait(10))
    queue.close()
    assert not both.broken


def test_a_job_may_submit_another_and_idle_waits_for_it_too() -> None:
    queue, ran = RequestQueue("chain", 2, no_error), []

    def first() -> None:
        queue.submit("job", (0,), lambda: (time.sleep(0.02), ran.append("second")))
        ran.append("first")

    queue.submit("job", (0,), first)
    queue.wait_idle()
    assert ran == ["first", "second"]
    queue.close()
