"""When Python's garbage collector may run."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """The garbage collector leaves alone what exists now: with the objects of all imported modules
    a full collection takes a quarter of a second, in which no Python thread runs."""
    if gc.get_freeze_count():  # the caller does the same
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
    """Until `resume_collection`, no garbage is collected: what ends then may wait for a device, and
    that for the native thread that calls this. Makes no object: that might collect."""
    _pause_lock.acquire()  # not `with`, which makes some
    _paused.append(gc.isenabled())
    gc.disable()
    _pause_lock.release()


def resume_collection() -> None:
    _pause_lock.acquire()
    if _paused.pop():  # the last one: others may end in any order
        gc.enable()
    _pause_lock.release()


def _forget_pauses() -> None:
    """A forked child does not have the threads that would end them."""
    global _pause_lock
    _pause_lock = threading.Lock()
    if any(_paused):
        gc.enable()
    _paused.clear()


os.register_at_fork(after_in_child=_forget_pauses)
