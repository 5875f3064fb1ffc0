"""Shares have the imbalance that was asked for."""

import math

import pytest
import torch

from overspill.core.errors import ConfigError
from overspill.simulate import DrawnRouting, hot_shares, imbalance, zipf_shares
from tests.simulate.recordings import CPU, assert_distinct


def test_imbalance_is_equation_2() -> None:
    counts = [[5, 3, 0, 2], [1, 1, 1, 1], [0, 0, 7, 0]]
    naive = sum(sum((n / sum(layer)) ** 2 for n in layer) for layer in counts) / len(counts)
    assert imbalance(counts) == pytest.approx(naive)
    assert imbalance(torch.tensor(counts)) == pytest.approx(naive)
    assert imbalance([[3] * 16]) == pytest.approx(1 / 16)
    with pytest.raises(ConfigError, match="an assignment in each layer"):
        imbalance([[1, 2], [0, 0]])


@pytest.mark.parametrize("g", [1 / 16, 0.1, 0.4, 0.5])
def test_hot_experts_stand_over_a_floor_that_all_have(g: float) -> None:
    shares = hot_shares(16, g, top_k=2)
    assert sum(shares) == pytest.approx(1)
    assert sum(share**2 for share in shares) == pytest.approx(g)
    assert shares[0] == shares[1] <= 0.5 + 1e-9
    assert set(shares[2:]) == {shares[2]}
    assert (shares[2] > 0) == (g < 0.5)
    assert hot_shares(4, 0.25, top_k=4) == pytest.approx([0.25] * 4)
    assert sum(share**2 for share in hot_shares(16, 0.6, 2, repeat=True)) == pytest.approx(0.6)
    with pytest.raises(ConfigError, match="repeat=True"):
        hot_shares(16, 0.6, 2)


def test_shares_have_the_wanted_imbalance() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=60)
    @hypothesis.given(st.integers(1, 64), st.integers(1, 8), st.floats(0, 1), st.booleans())
    def check(n_experts: int, top_k: int, along: float, repeat: bool) -> None:
        top_k = min(top_k, n_experts)
        cap = 1.0 if repeat else 1 / top_k
        g = 1 / n_experts + along * (cap - 1 / n_experts)
        shares = zipf_shares(n_experts, g, top_k, repeat)
        assert len(shares) == n_experts
        assert sum(shares) == pytest.approx(1)
        assert sum(p * p for p in shares) == pytest.approx(g, rel=1e-6)
        assert max(shares) <= cap * (1 + 1e-12)
        assert min(shares) >= 0
        assert shares == sorted(shares, reverse=True)
        drawn = DrawnRouting([shares], top_k, repeat=repeat)
        assert drawn.shares(0) == pytest.approx(shares, abs=1e-7)
        ids = drawn(0, 50, CPU)
        assert ids.shape == (50, top_k)
        assert ids.dtype == torch.int64
        assert 0 <= int(ids.min()) <= int(ids.max()) < n_experts
        if not repeat:
            assert_distinct(ids)

    check()


def test_without_a_cap_shares_are_plain_zipf() -> None:
    shares = zipf_shares(8, 0.2)
    ranked = list(enumerate(shares, 1))[1:]
    exponents = [-math.log(p / shares[0]) / math.log(rank) for rank, p in ranked]
    assert exponents == pytest.approx([exponents[0]] * 7)


@pytest.mark.parametrize(
    ("g", "top_k", "repeat", "message"),
    [
        (0.05, 2, False, "below 1/16 = 0.0625"),
        (float("nan"), 2, False, "below"),
        (0.6, 2, False, r"above 1/2 = 0.5: .* one expert twice; .* repeat=True"),
        (1.1, 2, True, "above 1, where one expert gets every token"),
        (0.5, 17, False, "top_k=17 must be from 1 to the number of experts, 16"),
        (0.5, 0, False, "top_k=0"),
    ],
)
def test_an_imbalance_that_cannot_be_is_refused(
    g: float, top_k: int, repeat: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DrawnRouting.with_imbalance(2, 16, top_k, g, repeat=repeat)
