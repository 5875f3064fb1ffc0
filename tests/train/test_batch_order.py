from hypothesis import given
from hypothesis import strategies as st

from overspill.train.batch_order import BatchOrder


@given(
    count=st.integers(1, 40),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    most=st.integers(1, 9),
)
def test_every_epoch_has_each_item_once(count: int, seed: int, epoch: int, most: int) -> None:
    order, taken = BatchOrder(count, seed), list[int]()
    while len(taken) < count:
        taken += order.take(epoch * count + len(taken), most)
    assert sorted(taken) == list(range(count))


@given(positions=st.lists(st.integers(0, 500), min_size=1, max_size=30))
def test_the_order_depends_on_seed_and_position_alone(positions: list[int]) -> None:
    expected = BatchOrder(37, seed=3).take_across(0, 501)
    jumping = BatchOrder(37, seed=3)
    assert [jumping.take(i, 1) for i in positions] == [[expected[i]] for i in positions]


def test_epochs_and_seeds_have_different_orders() -> None:
    order = BatchOrder(100, 0)
    assert order.take(0, 100) != order.take(100, 100)
    assert order.take(0, 100) != BatchOrder(100, 1).take(0, 100)


def test_take_ends_with_the_epoch_and_take_across_goes_on() -> None:
    order = BatchOrder(10, seed=0)
    assert len(order.take(8, 4)) == 2
    assert order.take_across(8, 4) == order.take(8, 2) + order.take(10, 2)


def test_the_order_of_earlier_versions_stays() -> None:
    """A run that is resumed with a later version reads the same data."""
    assert BatchOrder(8, seed=3).take_across(5, 6) == [5, 3, 0, 2, 1, 4]
