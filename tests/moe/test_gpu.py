"""On a GPU: offloaded training follows plain training, also if every transfer is delayed."""

from pathlib import Path

import pytest
import torch

from overspill.moe.settings import Settings
from tests.moe.gpu_training import MODES, delays, offloaded, plain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measured_roughly")]


@pytest.mark.parametrize("where", MODES, ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("late", [False, True])
def test_fp32_follows_plain_training(
    where: dict[str, object], clip: float | None, late: bool, tmp_path: Path
) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    settings = Settings(inject=delays if late else None)
    steps = 10
    want = plain(torch.float32, clip, steps, seed=5)
    got = offloaded(torch.float32, clip, steps, 5, settings, **where)
    assert got == pytest.approx(want, rel=2e-4)


STEPS, LR = 20, 1e-3  # early enough that rounding has not grown into another run


def final(losses: list[float]) -> float:
    return sum(losses[-4:]) / 4


@pytest.fixture(scope="module")
def two_plain_runs() -> tuple[float, float]:
    """Final losses of two plain runs that differ in their seed."""
    one, two = (plain(torch.bfloat16, 1.0, STEPS, seed, LR) for seed in (5, 6))
    return final(one), final(two)


@pytest.mark.parametrize("where", MODES, ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_bf16_ends_within_the_spread_of_two_plain_runs(
    where: dict[str, object], late: bool, two_plain_runs: tuple[float, float], tmp_path: Path
) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    settings = Settings(inject=delays if late else None)
    losses = offloaded(torch.bfloat16, 1.0, STEPS, 5, settings, LR, **where)
    one, two = two_plain_runs
    assert final(losses) < 0.7 * losses[0]
    assert abs(final(losses) - one) <= abs(one - two), (final(losses), one, two)


@pytest.mark.parametrize("where", MODES, ids=str)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_experts_that_move_before_every_step_follow_plain_training(
    where: dict[str, object], clip: float | None, tmp_path: Path
) -> None:
    if where["mode"] == "disk":
        where = {**where, "disk": tmp_path}
    want = plain(torch.float32, clip, 10, seed=5)
    got = offloaded(torch.float32, clip, 10, 5, Settings(inject=delays), move=True, **where)
    assert got == pytest.approx(want, rel=2e-4)


@pytest.mark.parametrize("uploader", ["thread", "native"])
@pytest.mark.parametrize("slots", [2, 12])
def test_both_uploaders_follow_plain_training_under_delays(uploader: str, slots: int) -> None:
    settings = Settings(inject=delays, uploader=uploader)
    want = plain(torch.float32, None, 10, seed=5)
    got = offloaded(torch.float32, None, 10, 5, settings, mode="host", slots=slots)
    assert got == pytest.approx(want, rel=2e-4)
