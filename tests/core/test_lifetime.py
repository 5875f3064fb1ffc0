"""What the garbage collector ends must not wait for what its thread holds."""

import gc
import os
import threading

from overspill.core.garbage import pause_collection, resume_collection
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
    assert entered.wait(60)
    threads: list[threading.Thread] = []
    outside_engine_threads(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()], "otherwise it is called at once"


def test_garbage_is_collected_again_after_the_last_pause() -> None:
    for _ in range(2):
        pause_collection()
    assert not gc.isenabled()
    resume_collection()
    assert not gc.isenabled()
    resume_collection()
    assert gc.isenabled()
    gc.disable()
    try:
        pause_collection()
        resume_collection()
        assert not gc.isenabled(), "as before"
    finally:
        gc.enable()


def test_a_child_that_is_forked_in_a_pause_collects_garbage() -> None:
    pause_collection()
    try:
        child = os.fork()
        if child == 0:
            enabled = gc.isenabled()
            pause_collection()
            os._exit(0 if enabled and not gc.isenabled() else 1)
    finally:
        resume_collection()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
