"""The watchdog: a lost signal is reported, work that takes long is not."""

import threading
import time

import pytest

from overspill.core.errors import EngineError
from overspill.tiers.worker_sync import WorkerSync


def test_a_lost_signal_names_what_was_waited_for_and_who_should_have_signalled() -> None:
    sync = WorkerSync(watchdog_seconds=0.1)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"no progress .* expert 0\.1 \(uploader thread\); run"):
        sync.wait(lambda: False, "the upload of expert 0.1 (uploader thread)")
    assert 0.08 < time.monotonic() - began < 5


def test_a_device_that_computes_is_not_taken_for_a_hang(caplog: pytest.LogCaptureFixture) -> None:
    sync, done = WorkerSync(watchdog_seconds=0.1), threading.Event()
    sync.watch_device(lambda: not done.is_set())
    end = threading.Timer(0.35, lambda: (done.set(), sync.wake_main()))
    end.start()
    sync.wait(done.is_set, "a gradient buffer (update thread)")
    end.join()
    assert "the device has computed" in caplog.text
    assert "a gradient buffer (update thread)" in caplog.text


def test_a_signal_that_is_lost_after_the_device_has_computed_is_reported() -> None:
    sync = WorkerSync(watchdog_seconds=0.1)
    idle_at = time.monotonic() + 0.25
    sync.watch_device(lambda: time.monotonic() < idle_at)
    with pytest.raises(EngineError, match="no progress"):
        sync.wait(lambda: False, "a change")
    assert time.monotonic() > idle_at


def test_a_device_that_never_ends_is_reported_too() -> None:
    """Its streams may wait for a signal of the host."""
    sync = WorkerSync(watchdog_seconds=0.02)
    sync.watch_device(lambda: True)
    with pytest.raises(EngineError, match="no progress"):
        sync.wait(lambda: False, "a change")


def test_a_watchdog_for_other_waits_counts_time_without_progress_only() -> None:
    watchdog = WorkerSync(watchdog_seconds=0.1).watchdog("uploads (uploader thread)")
    for number in range(40):  # longer than the limit, but with progress
        watchdog.check(number)
        time.sleep(watchdog.interval)
    with pytest.raises(EngineError, match=r"waiting for uploads \(uploader thread\)"):
        _check_for_ever(watchdog)


def _check_for_ever(watchdog: object) -> None:
    while True:
        watchdog.check("the same")  # type: ignore[attr-defined]
        time.sleep(watchdog.interval)  # type: ignore[attr-defined]
