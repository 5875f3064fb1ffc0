"""Waits of tests. A limit only ends a test that hangs: a busy machine may be slow."""

import time
from collections.abc import Callable

SECONDS = 60.0


def wait_until(holds: Callable[[], object]) -> None:
    """Until `holds()` is true."""
    end = time.monotonic() + SECONDS
    pause = 1e-4
    while not holds():
        assert time.monotonic() < end, f"it does not hold after {SECONDS:.0f} s"
        time.sleep(pause)
        pause = min(0.01, 1.5 * pause)
