"""Requests with priorities, carried out by worker threads; one not started can be dropped."""

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TypeVar

Priority = tuple[int, ...]
_Item = TypeVar("_Item")


def run_all(job: Callable[[_Item], None], items: Iterable[_Item], workers: int) -> None:
    """Runs `job` for every item, in order, in so many threads. The first failure ends it: what has
    not started is dropped."""
    if workers == 1:
        for item in items:
            job(item)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="overspill-fill") as pool:
        try:
            for _ in pool.map(job, items):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    DROPPED = "dropped"


class Request:
    """One job in a `RequestQueue`; lower priority tuples run first."""

    __slots__ = ("name", "priority", "run", "state")

    def __init__(self, name: str, priority: Priority, run: Callable[[], None]) -> None:
        self.name = name
        self.priority = priority
        self.run = run
        self.state = RequestState.WAITING


class RequestQueue:
    """Worker threads that always take the most urgent request.

    An exception in a request stops nothing else; it goes to `on_error`, which tells whoever waits.
    """

    def __init__(self, name: str, workers: int, on_error: Callable[[BaseException], None]) -> None:
        self._heap: list[tuple[Priority, int, Request]] = []
        self._order = itertools.count()  # equal priorities run first come, first served
        self._changed = threading.Condition()
        self._running = 0
        self._closed = False
        self._on_error = on_error
        self._threads = [
            threading.Thread(target=self._work, name=f"overspill-{name}-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, name: str, priority: Priority, run: Callable[[], None]) -> Request:
        request = Request(name, priority, run)
        with self._changed:
            assert not self._closed, "submit after close"
            heapq.heappush(self._heap, (priority, next(self._order), request))
            self._changed.notify()
        return request

    def drop(self, request: Request) -> bool:
        """Withdraws a request that has not started; False if it runs already or is done."""
        with self._changed:
            if request.state is not RequestState.WAITING:
                return False
            request.state = RequestState.DROPPED
            self._changed.notify_all()
            return True

    def wait_idle(self) -> None:
        """Blocks until nothing waits and nothing runs."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0 and not self._pending())

    def _pending(self) -> bool:
        while self._heap and self._heap[0][2].state is RequestState.DROPPED:
            heapq.heappop(self._heap)
        return bool(self._heap)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._pending())
                if not self._pending():
                    return
                request = heapq.heappop(self._heap)[2]
                request.state = RequestState.RUNNING
                self._running += 1
            try:
                request.run()
            except BaseException as error:  # whoever waits for the result must hear of it
                self._on_error(error)
            finally:
                with self._changed:
                    request.state = RequestState.DONE
                    self._running -= 1
                    self._changed.notify_all()

    def close(self) -> None:
        """Finishes what is queued and ends the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
