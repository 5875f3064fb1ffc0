import gc

from overspill.core.garbage import short_collections


def test_what_exists_is_left_alone_until_the_end_of_the_block() -> None:
    before = gc.get_freeze_count()
    gc.unfreeze()
    try:
        with short_collections():
            assert gc.get_freeze_count() > 0
            with short_collections():  # does nothing
                pass
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        if before:  # by tests/conftest.py
            gc.freeze()
