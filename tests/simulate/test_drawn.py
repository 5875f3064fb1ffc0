"""Drawn routing has the given shares, with distinct experts for each token."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from overspill.core.errors import ConfigError
from overspill.simulate import DrawnRouting, ReplayedRouting, imbalance
from tests.simulate.recordings import CPU, ROUTING, assert_distinct, counts_of, needs_recordings


@pytest.mark.parametrize(
    ("n_experts", "top_k", "g", "repeat"),
    [
        (16, 2, 1 / 16, False),
        (16, 2, 0.2, False),
        (16, 2, 0.4, False),
        (16, 2, 0.5, False),
        (16, 2, 0.6, True),
        (64, 8, 0.05, False),
        (8, 1, 0.9, False),
    ],
)
def test_drawn_routing_has_the_wanted_imbalance(
    n_experts: int, top_k: int, g: float, repeat: bool
) -> None:
    layers, tokens = 4, 20_000
    source = DrawnRouting.with_imbalance(layers, n_experts, top_k, g, seed=3, repeat=repeat)
    ids = [source(layer, tokens, CPU) for layer in range(layers)]
    counts = torch.stack([counts_of(one, n_experts) for one in ids])
    assert imbalance(counts) == pytest.approx(g, rel=0.02)
    assert imbalance([source.shares(layer) for layer in range(layers)]) == pytest.approx(g)
    for layer, one in enumerate(ids):
        shares = torch.tensor(source.shares(layer), dtype=torch.float64)
        # five standard deviations, were all places independent
        bound = 5 * (shares * (1 - shares) / (tokens * top_k)).sqrt() + 1e-9
        assert ((counts[layer] / (tokens * top_k) - shares).abs() <= bound).all()
        # every place alike: the first is not that of the popular ones
        first = counts_of(one[:, :1], n_experts) / tokens
        assert ((first - shares).abs() <= bound * top_k**0.5).all()
        if not repeat:
            assert_distinct(one)


def test_an_expert_that_every_token_has_is_drawn_once_for_each() -> None:
    third = 1 / 3  # not a binary fraction: sums of it are not exact
    source = DrawnRouting([[third, third, third / 2, third / 2, 0.0]], top_k=3)
    ids = source(0, 5000, CPU)
    assert_distinct(ids)
    counts = counts_of(ids, 5).tolist()
    assert counts[:2] == [5000, 5000]
    assert counts[4] == 0


def test_draws_differ_by_call_and_layer_and_come_back_with_the_seed() -> None:
    def make(seed: int) -> DrawnRouting:
        return DrawnRouting.with_imbalance(3, 16, 2, 0.3, seed)

    source, twin, other = make(5), make(5), make(6)
    calls = [(0, 100), (1, 100), (0, 100), (2, 7)]
    drawn = [source(layer, n, CPU) for layer, n in calls]
    for (layer, n), one in zip(calls, drawn, strict=True):
        assert torch.equal(twin(layer, n, CPU), one)
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(other(0, 100, CPU), drawn[0])
    favourites = [int(np.argmax(make(0).shares(layer))) for layer in range(3)]
    assert len(set(favourites)) > 1


def test_no_tokens_are_no_rows() -> None:
    assert DrawnRouting.with_imbalance(1, 4, 2, 0.3)(0, 0, CPU).shape == (0, 2)


@pytest.mark.parametrize(
    ("shares", "top_k", "message"),
    [
        ([], 1, "at least one layer"),
        ([[1, 2], [1, 2, 3]], 1, "as many in each"),
        ([[1, 2], [0, 0]], 1, "layer 1"),
        ([[1, -2, 4]], 1, "layer 0"),
        ([[1, float("nan")]], 1, "layer 0"),
        ([[6, 2, 2]], 2, "0.6 of the assignments.* 0.5 at most"),
        ([[1, 2]], 3, "top_k=3"),
    ],
)
def test_shares_that_cannot_be_are_refused(
    shares: list[list[float]], top_k: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DrawnRouting(shares, top_k)


@pytest.mark.gpu
def test_on_a_gpu_a_draw_waits_for_nothing() -> None:
    device = torch.device("cuda", 0)
    source = DrawnRouting.with_imbalance(2, 16, 2, 0.4)
    trace = ReplayedRouting(torch.randint(16, (50, 2, 2)), 16)
    source(0, 10, device), trace(0, 10, device)  # tables are on the device now
    with torch.cuda.device(device):
        torch.cuda.set_sync_debug_mode("error")
        try:
            ids, replayed = source(1, 4096, device), trace(1, 4096, device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert ids.device == replayed.device == device
    assert_distinct(ids.cpu())


def test_counts_are_drawn_with_their_shares(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    counts = [[4.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]]
    path.write_text(json.dumps({"top_k": 2, "popularity": counts}))
    source = DrawnRouting.from_counts(path)
    assert (source.n_layers, source.n_experts, source.top_k) == (2, 4, 2)
    assert source.shares(0) == pytest.approx([0.4, 0.1, 0.2, 0.3])
    assert_distinct(source(0, 1000, CPU))
    by_layer = {"11": [0, 1, 1], "7": [2, 1, 1]}
    path.write_text(json.dumps({"a": {"expert_counts": {"books": by_layer}}}))
    source = DrawnRouting.from_counts(path, top_k=2, model="a", domain="books")
    assert source.shares(0) == pytest.approx([0.5, 0.25, 0.25]), "layers in the order of numbers"
    assert source.shares(1) == pytest.approx([0, 0.5, 0.5])
    with pytest.raises(ConfigError, match="give top_k"):
        DrawnRouting.from_counts(path, model="a", domain="books")
    with pytest.raises(ConfigError, match="has no model b; give one of: a"):
        DrawnRouting.from_counts(path, model="b")
    with pytest.raises(ConfigError, match="has no domain None; give one of: books"):
        DrawnRouting.from_counts(path, model="a")
    path.write_text(json.dumps({"ranked": [[1, 2]]}))
    with pytest.raises(ConfigError, match="no counts"):
        DrawnRouting.from_counts(path, model="ranked")
    for text in ("[", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"counts.json is not a JSON file of counts"):
            DrawnRouting.from_counts(path)


@needs_recordings
def test_the_recorded_counts_are_drawn() -> None:
    path = ROUTING / "meta_popularity.json"
    source = DrawnRouting.from_counts(path)
    popularity = json.loads(path.read_text())["popularity"]
    ids = [source(layer, 20_000, CPU) for layer in range(24)]
    drawn = imbalance(torch.stack([counts_of(one, 32) for one in ids]))
    assert drawn == pytest.approx(imbalance(popularity), rel=0.01)
    models = ROUTING / "olmoe_mixtral_expert_counts.json"
    olmoe = DrawnRouting.from_counts(models, top_k=8, model="olmoe", domain="arxiv")
    assert (olmoe.n_layers, olmoe.n_experts) == (3, 64)
    assert_distinct(olmoe(0, 2000, CPU))
