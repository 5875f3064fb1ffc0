"""What the garbage collector ends must not wait for what its thread holds."""

import threading

from overspill.core.lifetime import outside_engine_threads
from overspill.tiers.worker_sync import WorkerSync


def test_a_thread_with_the_lock_of_a_store_leaves_waiting_to_another() -> None:
    sync, entered = WorkerSync(), threading.Event()

    def close() -> None:
        with sync.lock:
            entered.set()

    with sync.lock:
        outside_engine_threads(close)
        assert not entered.is_set()
    assert entered.wait(10)
    threads: list[threading.Thread] = []
    outside_engine_threads(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()], "otherwise it is called at once"
