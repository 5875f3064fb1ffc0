"""Forecasts of training steps on several GPUs: what limits them, and what more GPUs change."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.errors import ConfigError
from overspill.simulate.forecast import NodeRates, TrainingWork, forecast

RATES = NodeRates(
    link=50e9,
    host_memory=170e9,
    cpu_update=5e9,
    compute=400e12,
    device_memory=4e12,
    exchange=300e9,
)
EVEN, UNEVEN = [1024] * 16, [8704, *[512] * 15]


def work(rows: list[int], scale: int = 1, layers: int = 24) -> TrainingWork:
    """A model of 5 B parameters with 16 experts a layer, top-1."""
    rows = [scale * count for count in rows]
    return TrainingWork(
        expert=12_582_912,
        dense=170_000_000,
        dense_active=130_000_000,
        d_model=1024,
        tokens=sum(rows),
        rows_LE=[rows] * layers,
    )


def test_one_gpu_needs_the_time_of_the_slowest_resource() -> None:
    found = forecast(work(EVEN), RATES, 1)
    parameters = 12_582_912 * 16 * 24
    assert found.cpu_update == pytest.approx(parameters / 5e9)
    assert found.uploads == pytest.approx(2 * 2 * parameters / 50e9)
    assert found.host_memory == pytest.approx(32 * parameters / 170e9)
    active = 130_000_000 + 24 * 12_582_912
    update = 170_000_000 * 28 / 4e12
    assert found.gpu == pytest.approx(8 * active * 16_384 / 400e12 + update)
    assert (found.seconds, found.limit) == (found.cpu_update, "CPU optimizer")
    assert found.exchange == 0


def test_resident_experts_use_neither_link_nor_host() -> None:
    found = forecast(work(EVEN), RATES, 1, resident=1)
    assert (found.uploads, found.host_memory, found.cpu_update) == (0, 0, 0)
    assert found.limit == "GPU"


def test_more_gpus_do_not_help_where_the_cpu_optimizer_limits() -> None:
    one, eight = (forecast(work(EVEN), RATES, n) for n in (1, 8))
    assert eight.seconds == one.seconds
    assert eight.gpu < one.gpu / 3


def test_more_gpus_help_with_large_batches_and_with_resident_experts() -> None:
    large = [forecast(work(EVEN, scale=16), RATES, n).seconds for n in (1, 2, 4, 8)]
    resident = [forecast(work(EVEN), RATES, n, resident=1).seconds for n in (1, 2, 4, 8)]
    assert large[1] < 0.6 * large[0]
    assert large[3] == pytest.approx(12_582_912 * 16 * 24 / 5e9)  # the optimizer remains
    assert resident == sorted(resident, reverse=True)
    assert resident[3] < resident[0] / 4


def test_gpus_that_share_a_link_or_host_memory_upload_no_faster() -> None:
    fast = dataclasses.replace(RATES, host_memory=1e12)
    own, shared, slow = (
        [forecast(work(EVEN), rates, n).uploads for n in (1, 4)]
        for rates in (
            fast,
            dataclasses.replace(fast, all_links=50e9),
            dataclasses.replace(fast, host_memory=50e9),
        )
    )
    assert own[1] == pytest.approx(own[0] / 4)
    assert shared == pytest.approx([own[0], own[0]])
    assert slow == pytest.approx([own[0], own[0]])


def test_dynamic_placement_is_not_used_where_its_uploads_cost_more_than_it_gains() -> None:
    slow = dataclasses.replace(RATES, host_memory=60e9)
    static, dynamic = (forecast(work(UNEVEN, scale=16), slow, 8, dynamic=on) for on in (0, 1))
    assert static.limit == "host memory"
    assert dynamic == static


def test_exchanges_through_host_memory_use_links_and_host_memory() -> None:
    direct = forecast(work(EVEN), RATES, 4)
    through = forecast(work(EVEN), dataclasses.replace(RATES, through_host=True), 4)
    assert through.uploads == pytest.approx(direct.uploads + direct.exchange)
    assert through.host_memory > direct.host_memory


def test_dynamic_placement_helps_an_uneven_routing_and_leaves_an_even_one() -> None:
    for resident in (0, 1):
        static, dynamic = (
            forecast(work(UNEVEN, scale=64), RATES, 4, resident, dynamic=on) for on in (False, True)
        )
        assert dynamic.seconds < 0.7 * static.seconds
        even = [forecast(work(EVEN), RATES, 4, resident, dynamic=on) for on in (False, True)]
        assert even[0] == even[1]


def test_the_busiest_gpu_of_each_layer_determines_the_step() -> None:
    even, uneven = (forecast(work(rows), RATES, 4, resident=1) for rows in (EVEN, UNEVEN))
    assert uneven.gpu > 1.5 * even.gpu
    assert uneven.exchange > 1.5 * even.exchange


def test_slow_exchanges_are_named_as_the_limit() -> None:
    slow = dataclasses.replace(RATES, exchange=1e9)
    assert forecast(work(EVEN), slow, 4, resident=1).limit == "exchange"


@given(
    st.lists(st.lists(st.integers(0, 5000), min_size=3, max_size=3), min_size=1, max_size=3),
    st.integers(1, 8),
    st.floats(0, 1),
    st.booleans(),
)
def test_no_forecast_is_faster_than_even_work_on_all_gpus(
    rows: list[list[int]], n_gpus: int, resident: float, dynamic: bool
) -> None:
    found = forecast(
        TrainingWork(1000, 0, 0, 64, 100, rows), RATES, n_gpus, resident, dynamic=dynamic
    )
    assert found.seconds >= 8 * 1000 * sum(map(sum, rows)) / n_gpus / 400e12 * (1 - 1e-9)
    assert found.seconds == max(found.gpu, found.uploads, found.host_memory, found.cpu_update)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_gpus": 0}, "n_gpus=0 must be at least 1"),
        ({"n_gpus": 2, "resident": 1.5}, "resident=1.5 is a share"),
    ],
)
def test_wrong_numbers_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        forecast(work(EVEN), RATES, **arguments)


def test_rates_are_above_zero() -> None:
    with pytest.raises(ConfigError, match="link=0 must be above 0"):
        dataclasses.replace(RATES, link=0)
