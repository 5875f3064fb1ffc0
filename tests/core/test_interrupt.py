import signal
import threading
import time

import pytest

from overspill.core.interrupt import Condition, DeferredInterrupt
from tests.interrupts import calls_of, interrupted


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def steps_done(*steps: str) -> int:
    """How many steps are done before a KeyboardInterrupt within the context."""
    done = 0
    try:
        with DeferredInterrupt() as interrupt:
            for step in steps:
                press_ctrl_c() if step == "press" else interrupt.check()
                done += 1
    except KeyboardInterrupt:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return done


def test_the_first_ctrl_c_takes_effect_in_check() -> None:
    assert steps_done("check", "press", "check", "check") == 2
    assert steps_done("check", "check") == 2


def test_the_second_ctrl_c_takes_effect_at_once() -> None:
    assert steps_done("press", "press", "check") == 1


def test_a_pending_ctrl_c_takes_effect_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        press_ctrl_c()


def test_an_error_is_not_hidden_by_a_pending_ctrl_c() -> None:
    def fail() -> None:
        press_ctrl_c()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), DeferredInterrupt():
        fail()


def test_other_threads_change_no_handler() -> None:
    seen = []

    def run() -> None:
        with DeferredInterrupt() as interrupt:
            interrupt.check()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_condition_holds_its_lock_after_an_interrupt_anywhere() -> None:
    lock = threading.RLock()
    condition = Condition(lock)
    woken = 0

    def wait() -> None:
        nonlocal woken
        with lock, lock:  # as if its caller held it too
            condition.wait(0.001)
            condition.notify_all()
            condition.notify()
            woken += 1

    for at in range(1, calls_of(wait) + 1):
        assert interrupted(wait, at)
        with pytest.raises(RuntimeError, match="un-acquired"):
            lock.release()
    wait()
    assert woken == 2


def test_a_condition_wakes_those_that_wait() -> None:
    lock = threading.RLock()
    condition = Condition(lock)
    woken: list[int] = []

    def wait(number: int) -> None:
        with lock:
            ready.release()
            condition.wait(60)
            woken.append(number)

    ready = threading.Semaphore(0)
    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
        ready.acquire()  # it has the lock, or waits
    with lock:
        condition.notify()
    threads[0].join()
    assert woken == [0]
    with lock:
        condition.notify_all()
    for thread in threads:
        thread.join()
    assert sorted(woken) == [0, 1, 2]


def test_a_condition_ends_its_wait_without_a_notification() -> None:
    lock = threading.RLock()
    condition = Condition(lock)
    began = time.monotonic()
    with lock:
        condition.wait(0.001)
        condition.notify_all()  # nobody waits
    assert time.monotonic() - began >= 0.001
