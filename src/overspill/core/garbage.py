"""Python's garbage collector during training."""

import contextlib
import gc
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
