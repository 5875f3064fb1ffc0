from hypothesis import given
from hypothesis import strategies as st

from overspill.hardware.profile import Curve
from overspill.probe.comparison import Comparison, comparisons
from tests.hardware.test_profile import some_costs

rising = st.lists(st.floats(0.01, 5), min_size=3, max_size=3).map(
    lambda seconds: Curve((1, 8, 32), tuple(sorted(seconds)))
)


@given(st.floats(0.01, 5), rising, rising)
def test_beyond_the_crossing_the_cpu_is_slower(load: float, cpu: Curve, gpu: Curve) -> None:
    wins = Comparison("any", load, cpu, gpu).crossing(32)
    assert all(cpu(count) <= load + gpu(count) for count in range(1, wins + 1))
    assert wins == 32 or cpu(wins + 1) > load + gpu(wins + 1)


def test_each_direction_has_its_own_curves() -> None:
    costs = some_costs()
    forward, backward = comparisons(costs)
    assert (forward.cpu, forward.gpu) == (costs.cpu_forward, costs.gpu_forward)
    assert (backward.cpu, backward.gpu) == (costs.cpu_backward, costs.gpu_backward)
    assert forward.load == backward.load == costs.load
