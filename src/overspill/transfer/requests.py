"""Worker threads that run jobs by priority."""

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from overspill.core.interrupt import Condition

Priority = tuple[int, ...]
_Item = TypeVar("_Item")


def run_all(job: Callable[[_Item], None], items: Iterable[_Item], workers: int) -> None:
    """Run `job` for every item, in order, in `workers` threads. After the first failure no further
    job starts."""
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


class RequestQueue:
    """Worker threads that always take the most urgent job: the one with the lowest priority tuple,
    and among equals the oldest.

    An exception in a job stops no other; it is passed to `on_error`.
    """

    def __init__(self, name: str, workers: int, on_error: Callable[[BaseException], None]) -> None:
        self._heap: list[tuple[Priority, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._closed = False
        self._on_error = on_error
        self._threads: list[threading.Thread] = []
        try:
            for i in range(workers):
                thread = threading.Thread(target=self._work, name=f"overspill-{name}-{i}")
                thread.daemon = True
                thread.start()
                self._threads.append(thread)
        except BaseException:  # the system may allow no more threads
            self.close()
            raise

    def submit(self, priority: Priority, job: Callable[[], None]) -> None:
        with self._lock:
            assert not self._closed, "submit after close"
            heapq.heappush(self._heap, (priority, next(self._order), job))
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._closed and not self._heap:
                    self._changed.wait()
                if not self._heap:
                    return
                job = heapq.heappop(self._heap)[2]
            try:
                job()
            except BaseException as error:  # a thread may wait for the result
                self._on_error(error)
            del job

    def close(self) -> None:
        """Finish the queued jobs and end the threads."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
