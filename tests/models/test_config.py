"""Model configs: what they count and what they refuse."""

import dataclasses

import pytest

from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.models.presets import get_preset

TINY = GPTConfig(
    vocab=64, n_layers=4, d_model=32, d_hidden=48, n_heads=2, n_experts=4, top_k=2, moe_every=2
)


def test_every_second_layer_is_moe() -> None:
    assert [TINY.is_moe(layer) for layer in range(4)] == [False, True, False, True]
    assert TINY.n_moe_layers == 2
    assert TINY.total_params == TINY.dense_params + TINY.expert_params
    assert TINY.expert_params == 2 * 4 * 2 * 32 * 48


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab": 0}, "vocab=0"),
        ({"n_experts": 2.5}, "n_experts=2.5"),
        ({"top_k": 5}, "give at most 4"),
        ({"n_heads": 3}, "multiple of 6"),
        ({"d_model": 34}, "n_heads=2"),
        ({"moe_every": 5}, "moe_every=5"),
        ({"balance_coef": -1.0}, "balance_coef=-1.0"),
        ({"balance_coef": float("nan")}, "balance_coef=nan"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
    ],
)
def test_bad_value_is_named_with_the_fix(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(TINY, **change)  # type: ignore[arg-type]


# Table 1 of the ES-MoE paper, in millions.
@pytest.mark.parametrize(
    ("name", "n_experts", "millions"),
    [
        ("moe-s", 8, 521),
        ("moe-m", 8, 1_760),
        ("moe-l", 8, 3_930),
        ("moe-s", 16, 974),
        ("moe-m", 16, 3_370),
        ("moe-l", 16, 7_560),
        ("moe-s", 32, 1_880),
        ("moe-m", 32, 6_600),
        ("moe-l", 32, 14_800),
        ("moe-s", 64, 3_700),
        ("moe-m", 64, 13_000),
        ("moe-l", 64, 29_300),
    ],
)
def test_presets_have_the_papers_parameter_counts(name: str, n_experts: int, millions: int) -> None:
    config = get_preset(name, n_experts=n_experts)
    assert config.total_params == pytest.approx(millions * 1e6, rel=0.01)


def test_w1_has_five_billion_parameters() -> None:
    assert get_preset("w1").total_params == pytest.approx(5.0e9, rel=0.01)


def test_unknown_preset_lists_the_names_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"nano, moe-s, .*w1, .*; did you mean moe-xl or"):
        get_preset("moe-xxl")
    with pytest.raises(ConfigError, match=r"aptmoe-l-8$"):
        get_preset("zzz")


def test_unknown_override_names_the_nearest_field() -> None:
    with pytest.raises(ConfigError, match=r"'n_expert' .*did you mean n_experts\?"):
        get_preset("nano", n_expert=4)


def test_override_is_checked_like_any_config() -> None:
    assert get_preset("nano", n_experts=32).n_experts == 32
    with pytest.raises(ConfigError, match="top_k=2"):
        get_preset("nano", n_experts=1)
