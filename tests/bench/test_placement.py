"""The benchmarks of placement: forecasts of measured steps, and the balance of drawn routing."""

import importlib
from types import ModuleType

import pytest


@pytest.fixture
def forecast(scripts: None) -> ModuleType:
    return importlib.import_module("forecast")


@pytest.fixture
def placement(scripts: None) -> ModuleType:
    return importlib.import_module("placement")


def test_steps_of_w1_that_one_resource_limits_are_predicted_within_15_percent(
    forecast: ModuleType,
) -> None:
    """On machines that update experts at the rate of the forecast. docs/multi-gpu.md has the other
    steps, those in which GPU and CPU take similar times, and older ones that the GPU limits."""
    found = {check.record: check.error for check in forecast.checks(forecast.measured_rates())}
    offloaded = [f"residency-w1-{gib}gib" for gib in (5, 8, 12)]
    for record in (*offloaded, "train-w1-gpu-only-16x1024"):
        assert abs(found[record]) < 0.15


def test_the_models_have_the_parameters_of_their_records(forecast: ModuleType) -> None:
    for name, model in (
        ("train-w1-16x1024", forecast.W1),
        ("residency-moe-l-24-40gib", forecast.moe_l(24)),
    ):
        config, work = forecast.read(name)["config"], model.work(1024)
        assert work.experts == config["expert_parameters"]
        assert work.dense == pytest.approx(
            config["parameters"] - config["expert_parameters"], rel=0.01
        )


def test_more_gpus_do_not_help_streamed_training_at_small_batches(forecast: ModuleType) -> None:
    rates = forecast.measured_rates()
    one, eight = (forecast.forecast(forecast.W1.work(16 * 1024), rates, n) for n in (1, 8))
    assert eight.limit in ("host memory", "CPU optimizer")
    assert eight.seconds >= one.seconds


def test_placement_balances_many_experts_and_splits_one(
    placement: ModuleType, forecast: ModuleType
) -> None:
    rates = forecast.measured_rates()
    many = placement.drawn("64 experts", 64, 8, 3 * 2048 * 1024, 6)
    found = placement.measure(many, 8, rates)
    assert max(found["static"]) >= 2.0
    assert max(found["dynamic"]) <= 1.15
    hot = placement.measure(placement.one_hot(), 4, rates)
    assert min(hot["static"]) >= 2.0
    assert max(hot["dynamic"]) <= 1.25
