"""Jobs run by priority, side by side, and failures are reported."""

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.transfer.requests import RequestQueue, run_all


def no_error(error: BaseException) -> None:
    raise AssertionError(f"unexpected: {error!r}")


class BusyQueue:
    """A queue of one worker that is busy until `open`."""

    def __init__(self, on_error: Callable[[BaseException], None] = no_error) -> None:
        self.queue = RequestQueue("test", 1, on_error)
        self._begun, self._open = threading.Event(), threading.Event()
        self.queue.submit((-1,), self._wait)
        assert self._begun.wait(60)

    def _wait(self) -> None:
        self._begun.set()
        assert self._open.wait(60)

    def finish(self) -> None:
        self._open.set()
        self.queue.close()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_the_most_urgent_runs_first_and_equals_in_order(priorities: list[tuple[int, int]]) -> None:
    busy, ran = BusyQueue(), []
    for number, priority in enumerate(priorities):
        busy.queue.submit(priority, lambda n=number: ran.append(n))
    busy.finish()
    assert ran == sorted(range(len(priorities)), key=lambda number: priorities[number])


def test_an_error_is_reported_and_stops_no_other_job() -> None:
    errors: list[BaseException] = []
    busy, ran = BusyQueue(errors.append), []

    def fail() -> None:
        raise OSError("broken")

    busy.queue.submit((0,), fail)
    busy.queue.submit((1,), lambda: ran.append("after"))
    busy.finish()
    assert ran == ["after"]
    assert [str(error) for error in errors] == ["broken"]


def test_closing_finishes_queued_jobs_and_ends_the_threads() -> None:
    queue, done = RequestQueue("drained", 3, no_error), []
    for number in range(20):
        queue.submit((number,), lambda n=number: (time.sleep(0.001), done.append(n)))
    queue.close()
    assert sorted(done) == list(range(20))
    assert not [t for t in threading.enumerate() if t.name.startswith("overspill-drained")]
    with pytest.raises(AssertionError, match="after close"):
        queue.submit((0,), lambda: None)


def test_jobs_run_side_by_side() -> None:
    queue, both = RequestQueue("pair", 2, no_error), threading.Barrier(2)
    for _ in range(2):
        queue.submit((0,), lambda: both.wait(60))
    queue.close()
    assert not both.broken


def test_a_job_may_submit_another() -> None:
    queue, ran, submitted = RequestQueue("chain", 1, no_error), [], threading.Event()

    def first() -> None:
        queue.submit((0,), lambda: ran.append("second"))
        ran.append("first")
        submitted.set()

    queue.submit((0,), first)
    assert submitted.wait(60)
    queue.close()
    assert ran == ["first", "second"]


@pytest.mark.parametrize("workers", [1, 3])
def test_run_all_runs_every_item_and_starts_none_after_a_failure(workers: int) -> None:
    ran: list[int] = []
    run_all(ran.append, range(10), workers)
    assert sorted(ran) == list(range(10))
    ran.clear()

    def fail_at_2(item: int) -> None:
        if item == 2:
            raise OSError("broken")
        if item > 2:
            time.sleep(0.05)
        ran.append(item)

    with pytest.raises(OSError, match="broken"):
        run_all(fail_at_2, range(1000), workers)
    assert len(ran) < 500, "a few, until the failure is seen"
