from hypothesis import given
from hypothesis import strategies as st

from overspill.hardware.profile import Curve
from overspill.probe.affinity import Contest, contests
from tests.hardware.test_profile import some_costs

rising = st.lists(st.floats(0.01, 5), min_size=3, max_size=3).map(
    lambda seconds: Curve((1, 8, 32), tuple(sorted(seconds)))
)


@given(st.floats(0.01, 5), rising, rising)
def test_the_crossing_is_where_the_cpu_first_loses(load: float, cpu: Curve, gpu: Curve) -> None:
    contest = Contest("any", load, cpu, gpu)
    wins = contest.cpu_wins_up_to(32)
    assert all(cpu(count) <= load + gpu(count) for count in range(1, wins + 1))
    assert wins == 32 or cpu(wins + 1) > load + gpu(wins + 1)


def test_every_way_has_its_own_curves() -> None:
    costs = some_costs()
    forward, frozen, trained = contests(costs)
    assert forward.cpu is costs.cpu_forward
    assert frozen.gpu is costs.gpu_backward
    assert trained.cpu is costs.cpu_train
    assert {way.load for way in (forward, frozen, trained)} == {costs.load}
