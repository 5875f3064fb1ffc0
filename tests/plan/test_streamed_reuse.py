"""The predicted time of a layer with streamed experts, and what follows for received rows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.experts import ExpertShape
from overspill.plan.reuse import STRATEGIES, Restore, Speeds, cost
from overspill.plan.streamed_reuse import StreamedLayer, cheapest_restore, seconds

SHAPE = ExpertShape(1024, 4096, gated=False)
EXPERT = 2 * SHAPE.in_numel * 2  # bytes of two matrices in bf16
LAYER = StreamedLayer(SHAPE, 2, 16384, 8 * EXPERT, 8 * EXPERT, shared_link=False)
SPEEDS = Speeds(compute=4e14, exchange=3e11, copy=5e10)
SPEED = st.floats(1e8, 1e16)
ANY_SPEEDS = st.builds(Speeds, SPEED, SPEED, SPEED, *[st.floats(0.1, 1.0)] * 3)
BYTES = st.integers(0, 10**10)
LAYERS = st.builds(
    StreamedLayer, st.just(SHAPE), st.just(2), st.integers(0, 10**6), BYTES, BYTES, st.booleans()
)


@given(ANY_SPEEDS, st.integers(1, 10**5))
def test_without_streamed_experts_it_is_the_model_of_resident_ones(
    speeds: Speeds, rows: int
) -> None:
    layer = StreamedLayer(SHAPE, 2, rows, 0, 0, shared_link=False)
    for restore, name in ((Restore.REPEAT, "S4"), (Restore.OFFLOAD, "S3")):
        want = rows * cost(STRATEGIES[name], SHAPE, speeds, 2)
        assert seconds(restore, layer, speeds) == pytest.approx(want)


def test_uploads_and_downloads_over_one_link_are_the_limit_if_they_take_longest() -> None:
    slow = replace(SPEEDS, copy=1e9)
    assert seconds(Restore.REPEAT, LAYER, slow) == pytest.approx(2 * LAYER.uploads / 1e9)
    double = replace(LAYER, downloads=2 * LAYER.uploads)
    assert seconds(Restore.REPEAT, double, slow) == pytest.approx(3 * LAYER.uploads / 1e9)


@given(LAYERS, ANY_SPEEDS)
def test_keeping_rows_is_never_slower(layer: StreamedLayer, speeds: Speeds) -> None:
    keep = seconds(Restore.KEEP, layer, speeds)
    for restore in (Restore.REPEAT, Restore.OFFLOAD):
        assert keep <= seconds(restore, layer, speeds) * (1 + 1e-9)


@given(LAYERS, SPEED, SPEED, st.floats(1.0, 10.0))
def test_copies_to_host_memory_do_not_pay_over_the_link_of_the_uploads(
    layer: StreamedLayer, compute: float, copy: float, factor: float
) -> None:
    """Nor beside an exchange that is three times as fast. Gradients are not larger than weights, so
    in backward rows that come back delay uploads as long as the rows that are sent again."""
    layer = replace(layer, downloads=min(layer.downloads, layer.uploads))
    speeds = Speeds(compute, copy * factor * (1 if layer.shared_link else 3), copy)
    again, copied = (seconds(r, layer, speeds) for r in (Restore.REPEAT, Restore.OFFLOAD))
    assert again <= copied * (1 + 1e-9)


def test_copies_would_pay_beside_a_slow_exchange_of_its_own() -> None:
    slow = replace(SPEEDS, exchange=2e9)
    again, copied = (seconds(r, LAYER, slow) for r in (Restore.REPEAT, Restore.OFFLOAD))
    assert copied < again
    assert seconds(Restore.KEEP, LAYER, slow) == copied


def test_rows_are_kept_only_where_the_exchange_takes_longest() -> None:
    assert cheapest_restore(LAYER, SPEEDS) is Restore.REPEAT  # uploads take longest
    assert cheapest_restore(LAYER, replace(SPEEDS, exchange=2e9)) is Restore.KEEP
    few = replace(LAYER, rows=16)
    assert cheapest_restore(few, replace(SPEEDS, exchange=2e9)) is Restore.REPEAT
    shared = replace(LAYER, rows=10**6, shared_link=True)  # rows delay uploads
    assert cheapest_restore(shared, replace(SPEEDS, compute=1e16)) is Restore.KEEP
