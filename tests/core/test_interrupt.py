import signal
import threading

import pytest

from overspill.core.interrupt import DeferredInterrupt


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
