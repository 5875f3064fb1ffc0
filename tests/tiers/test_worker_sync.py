"""The watchdog: a lost signal is reported, work that takes long is not."""

import time

import pytest

from overspill.core.errors import EngineError
from overspill.tiers.worker_sync import WorkerSync
from tests.clock import Clock


def test_a_lost_signal_names_what_was_waited_for_and_who_should_have_signalled() -> None:
    sync = WorkerSync(watchdog_seconds=0.1)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"no progress .* expert 0\.1 \(uploader thread\); run"):
        sync.wait(lambda: False, "the upload of expert 0.1 (uploader thread)")
    assert time.monotonic() - began > 0.08


def test_a_device_that_computes_is_not_taken_for_a_hang(caplog: pytest.LogCaptureFixture) -> None:
    sync = WorkerSync(watchdog_seconds=0.1)
    sync.device_busy = lambda: True
    sync.wait(
        lambda: caplog.text.count("the device has computed") == 3,
        "a gradient buffer (update thread)",
    )
    assert "a gradient buffer (update thread)" in caplog.text


def test_a_signal_that_is_lost_after_the_device_has_computed_is_reported() -> None:
    sync = WorkerSync(watchdog_seconds=0.1)
    busy = iter([True, True, False])
    sync.device_busy = lambda: next(busy)
    with pytest.raises(EngineError, match="no progress"):
        sync.wait(lambda: False, "a change")
    assert next(busy, None) is None, "it has computed at first"


def test_a_device_that_never_ends_is_reported_too() -> None:
    """Its streams may wait for a signal of the host."""
    sync = WorkerSync(watchdog_seconds=0.02)
    sync.device_busy = lambda: True
    with pytest.raises(EngineError, match="no progress"):
        sync.wait(lambda: False, "a change")


def test_a_watchdog_for_other_waits_counts_time_without_progress_only() -> None:
    clock = Clock()
    watchdog = WorkerSync(watchdog_seconds=100, now=clock).watchdog("uploads (uploader thread)")
    for number in range(200):  # longer than the limit, but with progress
        clock.seconds += 1
        watchdog.check(number)
    for _ in range(99):
        clock.seconds += 1
        watchdog.check("the same")  # the first time it is progress
    clock.seconds += 1
    watchdog.check("the same")
    clock.seconds += 1
    with pytest.raises(EngineError, match=r"waiting for uploads \(uploader thread\)"):
        watchdog.check("the same")


def test_the_watchdog_does_not_count_time_in_which_the_process_was_suspended() -> None:
    clock = Clock()
    watchdog = WorkerSync(watchdog_seconds=100, now=clock).watchdog("a change")
    watchdog.check("the same")
    clock.seconds += 1000
    watchdog.check("the same")
    clock.seconds += 1000
    watchdog.check("the same")
