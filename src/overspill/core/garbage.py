"""Limits on Python's garbage collector."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Exclude all present objects from garbage collection within the block: with the objects of all
    imported modules a full collection takes a quarter of a second, in which no Python thread
    runs."""
    if gc.get_freeze_count():  # the caller has excluded them
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_pause_lock = threading.Lock()
_paused: list[bool] = []  # for each pause: whether it has disabled the garbage collector


def pause_collection() -> None:
    """Collect no garbage until `resume_collection`. The end of an object may wait for a device,
    and the device for the native thread that calls this. Creates no object: that could start a
    collection."""
    _pause_lock.acquire()  # not `with`, which creates objects
    _paused.append(gc.isenabled())
    gc.disable()
    _pause_lock.release()


def resume_collection() -> None:
    _pause_lock.acquire()
    if _paused.pop():  # the last pause: pauses may end in any order
        gc.enable()
    _pause_lock.release()


def _forget_pauses() -> None:
    """Enable collection in a forked child, which lacks the threads that would end the pauses."""
    global _pause_lock
    _pause_lock = threading.Lock()
    if any(_paused):
        gc.enable()
    _paused.clear()


os.register_at_fork(after_in_child=_forget_pauses)
