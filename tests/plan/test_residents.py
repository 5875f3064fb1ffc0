"""How the memory of the compute device is shared between experts and gradients."""

from hypothesis import given
from hypothesis import strategies as st

from overspill.plan.residents import DeviceShare, share_memory, spread_among

NOTHING = DeviceShare(0)


@given(st.integers(-50, 5000), st.integers(5, 40), st.integers(1, 5), st.integers(1, 200))
def test_kept_gradients_fit_and_more_memory_never_means_fewer_experts(
    free: int, expert: int, kept: int, total: int
) -> None:
    share = share_memory(free, NOTHING, expert, total, kept=kept)
    assert 0 <= share.gradients <= share.experts <= total
    assert share.experts * expert + share.gradients * kept <= max(0, free)
    more = share_memory(free + expert, NOTHING, expert, total, kept=kept)
    assert more.experts >= share.experts
    # what it decides for itself does not change when it is there
    left = free - share.experts * expert - share.gradients * kept
    assert share_memory(left, share, expert, total, kept=kept) == share


def test_with_room_for_all_every_gradient_stays_on_the_device() -> None:
    assert share_memory(1400, NOTHING, 12, 100, kept=2) == DeviceShare(100, 100)


def test_with_little_room_every_gradient_waits_in_host_memory() -> None:
    assert share_memory(605, NOTHING, 12, 100, kept=2) == DeviceShare(50, 2)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_kept_gradients_are_spread_over_the_experts_resident(
    residents: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, sum(residents)))
    spread = spread_among(count, residents)
    assert sum(spread) == count
    assert all(0 <= n <= home for n, home in zip(spread, residents, strict=True))


@given(st.integers(-50, 3000), st.integers(5, 40), st.integers(1, 4), st.integers(1, 60), st.data())
def test_the_most_experts_live_on_the_device_beside_the_sums_of_one_stage(
    free: int, expert: int, gradient: int, total: int, data: st.DataObject
) -> None:
    sums = data.draw(st.integers(1, 2 * total))
    share = share_memory(free, NOTHING, expert, total, gradient, sums=sums)
    fitting = [
        experts
        for experts in range(total + 1)
        if experts * expert + min(sums, total - experts) * gradient <= free
    ]
    assert share.experts == max(fitting, default=0)
    assert share.gradients <= min(sums, total - share.experts)
    if fitting:
        assert share.gradients == min(sums, total - share.experts)
    else:  # as many sums as fit
        assert share.gradients == min(sums, total, max(0, free) // gradient)
    left = free - share.experts * expert - share.gradients * gradient
    assert share_memory(left, share, expert, total, gradient, sums=sums) == share


@given(st.integers(-50, 3000), st.integers(5, 40), st.integers(0, 4), st.integers(1, 60))
def test_without_stages_each_streamed_expert_may_have_a_sum(
    free: int, expert: int, gradient: int, total: int
) -> None:
    whole = share_memory(free, NOTHING, expert, total, gradient, sums=total)
    assert share_memory(free, NOTHING, expert, total, gradient) == whole
