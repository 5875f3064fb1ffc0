"""Routing that was simulated or recorded: the wanted imbalance, exact probabilities, the trace."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.moe.popularity import (
    Drawn,
    Replayed,
    RoutingSource,
    Simulated,
    hot_shares,
    imbalance,
    rerouted,
    routed_by,
    zipf_shares,
)

ROOT = Path(__file__).resolve().parents[2]
ROUTING = Path(os.environ.get("OVERSPILL_ROUTING", ROOT.parent / "shared" / "data" / "routing"))
TRACE = ROUTING / "gptoss20b_decode_experts_only.npz"
CPU = torch.device("cpu")

needs_recordings = pytest.mark.skipif(
    not TRACE.is_file(),
    reason=f"needs recorded routing: OVERSPILL_ROUTING=folder of {TRACE.name}",
)


def counts_of(ids_TK: Tensor, n_experts: int) -> Tensor:
    return torch.bincount(ids_TK.flatten(), minlength=n_experts)


def assert_distinct(ids_TK: Tensor) -> None:
    ordered = ids_TK.sort(-1).values
    assert not (ordered[:, 1:] == ordered[:, :-1]).any()


# -- how uneven ---------------------------------------------------------------------------


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
        drawn = Drawn([shares], top_k, repeat=repeat)
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
        (1.1, 2, True, "above 1, where one expert has every token"),
        (0.5, 17, False, "top_k=17 must be from 1 to the number of experts, 16"),
        (0.5, 0, False, "top_k=0"),
    ],
)
def test_an_imbalance_that_cannot_be_is_refused(
    g: float, top_k: int, repeat: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Simulated(2, 16, top_k, g, repeat=repeat)


# -- drawn --------------------------------------------------------------------------------


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
    source = Simulated(layers, n_experts, top_k, g, seed=3, repeat=repeat)
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
    source = Drawn([[third, third, third / 2, third / 2, 0.0]], top_k=3)
    ids = source(0, 5000, CPU)
    assert_distinct(ids)
    counts = counts_of(ids, 5).tolist()
    assert counts[:2] == [5000, 5000]
    assert counts[4] == 0


def test_draws_differ_by_call_and_layer_and_come_back_with_the_seed() -> None:
    def make(seed: int) -> Simulated:
        return Simulated(3, 16, 2, 0.3, seed)

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
    assert Simulated(1, 4, 2, 0.3)(0, 0, CPU).shape == (0, 2)


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
        Drawn(shares, top_k)


@pytest.mark.gpu
def test_on_a_gpu_a_draw_waits_for_nothing() -> None:
    device = torch.device("cuda", 0)
    source = Simulated(2, 16, 2, 0.4)
    trace = Replayed(torch.randint(16, (50, 2, 2)), 16)
    source(0, 10, device), trace(0, 10, device)  # tables are on the device now
    with torch.cuda.device(device):
        torch.cuda.set_sync_debug_mode("error")
        try:
            ids, replayed = source(1, 4096, device), trace(1, 4096, device)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert ids.device == replayed.device == device
    assert_distinct(ids.cpu())


# -- recorded -----------------------------------------------------------------------------


def trace_of(n_tokens: int, n_layers: int = 3, n_experts: int = 9, top_k: int = 2) -> Tensor:
    order = torch.rand(n_tokens, n_layers, n_experts).argsort(-1)
    return order[..., :top_k]


def test_a_replay_is_the_trace_again_and_again() -> None:
    trace = trace_of(10)
    source = Replayed(trace, 9)
    assert (source.n_layers, source.n_experts, source.top_k) == (3, 9, 2)
    taken: list[list[Tensor]] = [[], [], []]
    for n in (4, 3, 0, 6, 25):
        for layer in (2, 0):
            taken[layer].append(source(layer, n, CPU))
    taken[1].append(source(1, 38, CPU))
    for layer in range(3):
        replayed = torch.cat(taken[layer])
        assert replayed.dtype == torch.int64
        assert torch.equal(replayed, torch.cat([trace[:, layer]] * 4)[:38])


def test_sequences_are_those_of_the_file(tmp_path: Path) -> None:
    trace, offsets = trace_of(10), [0, 4, 4, 10]
    path = tmp_path / "trace.npz"
    np.savez(path, experts=trace.numpy().astype(np.uint8), offsets=np.array(offsets))
    source = Replayed.from_npz(path, n_experts=12)
    assert source.n_experts == 12
    assert torch.equal(source.sequence(0), trace[:4])
    assert source.sequence(1).shape == (0, 3, 2)
    assert torch.equal(source.sequence(-1), trace[4:])
    assert torch.equal(Replayed(source.sequence(2))(1, 6, CPU), trace[4:, 1])
    with pytest.raises(IndexError):
        source.sequence(3)
    with pytest.raises(ConfigError, match=r"names expert 8, of n_experts=5; give at least 9"):
        Replayed.from_npz(path, n_experts=5)


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.npz is not a recorded routing"):
        Replayed.from_npz(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ConfigError, match=r"text.npz is not a recorded routing"):
        Replayed.from_npz(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", experts=np.zeros((2, 2, 2), np.uint8))
    with pytest.raises(ConfigError, match="offsets"):
        Replayed.from_npz(tmp_path / "other.npz")
    np.savez(tmp_path / "float.npz", experts=np.zeros((2, 2, 2)), offsets=[0, 2])
    with pytest.raises(ConfigError, match="whole numbers"):
        Replayed.from_npz(tmp_path / "float.npz")
    for trace in (torch.zeros(3, 2), torch.zeros(0, 2, 2)):
        with pytest.raises(ConfigError, match=r"\[tokens, layers, top_k\]"):
            Replayed(trace.long())
    for offsets in ([0, 3], [1, 4], [0, 3, 2, 4], []):
        with pytest.raises(ConfigError, match="rise from 0 to 4"):
            Replayed(trace_of(4), offsets=offsets)


def test_counts_are_drawn_with_their_shares(tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    counts = [[4.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]]
    path.write_text(json.dumps({"top_k": 2, "popularity": counts}))
    source = Replayed.from_counts(path)
    assert (source.n_layers, source.n_experts, source.top_k) == (2, 4, 2)
    assert source.shares(0) == pytest.approx([0.4, 0.1, 0.2, 0.3])
    assert_distinct(source(0, 1000, CPU))
    by_layer = {"11": [0, 1, 1], "7": [2, 1, 1]}
    path.write_text(json.dumps({"a": {"expert_counts": {"books": by_layer}}}))
    source = Replayed.from_counts(path, top_k=2, model="a", domain="books")
    assert source.shares(0) == pytest.approx([0.5, 0.25, 0.25]), "layers in the order of numbers"
    assert source.shares(1) == pytest.approx([0, 0.5, 0.5])
    with pytest.raises(ConfigError, match="give top_k"):
        Replayed.from_counts(path, model="a", domain="books")
    with pytest.raises(ConfigError, match="has no model b; give one of: a"):
        Replayed.from_counts(path, model="b")
    with pytest.raises(ConfigError, match="has no domain None; give one of: books"):
        Replayed.from_counts(path, model="a")
    path.write_text(json.dumps({"ranked": [[1, 2]]}))
    with pytest.raises(ConfigError, match="no counts"):
        Replayed.from_counts(path, model="ranked")
    path.write_text("[")
    with pytest.raises(ConfigError, match=r"counts.json is not a JSON file of counts"):
        Replayed.from_counts(path)


@needs_recordings
def test_the_recorded_trace_is_replayed() -> None:
    source = Replayed.from_npz(TRACE)
    assert (source.n_layers, source.n_experts, source.top_k) == (24, 32, 4)
    with np.load(TRACE) as file:
        experts, offsets = file["experts"], file["offsets"]
    for layer in (0, 23):
        got = np.concatenate([source(layer, n, CPU).numpy() for n in (100, 57)])
        assert (got == experts[:157, layer]).all()
    assert len(source.offsets) == len(offsets) == 501
    assert (source.sequence(7).numpy() == experts[offsets[7] : offsets[8]]).all()


@needs_recordings
def test_the_recorded_counts_are_drawn() -> None:
    path = ROUTING / "meta_popularity.json"
    source = Replayed.from_counts(path)
    popularity = json.loads(path.read_text())["popularity"]
    ids = [source(layer, 20_000, CPU) for layer in range(24)]
    drawn = imbalance(torch.stack([counts_of(one, 32) for one in ids]))
    assert drawn == pytest.approx(imbalance(popularity), rel=0.01)
    models = ROUTING / "olmoe_mixtral_expert_counts.json"
    olmoe = Replayed.from_counts(models, top_k=8, model="olmoe", domain="arxiv")
    assert (olmoe.n_layers, olmoe.n_experts) == (3, 64)
    assert_distinct(olmoe(0, 2000, CPU))


# -- into a model -------------------------------------------------------------------------


@pytest.fixture
def model() -> Iterator[GPTMoE]:
    config = GPTConfig(
        vocab=32, n_layers=3, d_model=8, d_hidden=8, n_heads=2, n_experts=5, top_k=2, max_seq=8
    )
    model = GPTMoE(config, checkpoint=False)
    overspill.offload(model, device="cpu", mode="gpu", quiet=True)
    yield model
    model.overspill.close()


def sources(model: GPTMoE) -> list[RoutingSource | None]:
    placeholders = [p for p in model.parameters() if isinstance(p, ExpertPlaceholder)]
    return [placeholder.source for placeholder in placeholders]


def test_a_source_is_set_within_and_taken_back(model: GPTMoE) -> None:
    outer, inner = Simulated(3, 5, 2, 0.3), Replayed(trace_of(10, n_layers=4, n_experts=5))
    assert sources(model) == [None] * 3

    def fail_inside() -> None:
        with routed_by(model, inner):
            assert sources(model) == [inner] * 3
            raise RuntimeError("on purpose")

    with routed_by(model, outer):
        with pytest.raises(RuntimeError, match="on purpose"):
            fail_inside()
        assert sources(model) == [outer] * 3
    assert sources(model) == [None] * 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Simulated(2, 5, 2, 0.3), "has 2 MoE layers, the model 3"),
        (Simulated(3, 4, 2, 0.3), "has 4 experts a layer, the model 5"),
        (Simulated(3, 6, 2, 0.3), "has 6 experts a layer, the model 5"),
        (Simulated(3, 5, 1, 0.3), "has 1 experts a token, the model 2"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(
    model: GPTMoE, source: Simulated, message: str
) -> None:
    with pytest.raises(ConfigError, match=message), routed_by(model, source):
        pass
    assert sources(model) == [None] * 3


def test_a_model_without_offloaded_experts_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"overspill\.offload"),
        routed_by(nn.Linear(2, 2), Simulated(1, 4, 2, 0.3)),
    ):
        pass


def test_the_ids_of_a_gate_are_replaced_in_their_shape() -> None:
    source = Replayed(trace_of(10))
    ids = torch.zeros(4, 2, dtype=torch.int64)
    assert torch.equal(rerouted(source, 1, ids), source.sequence(0)[:4, 1])
    with pytest.raises(ConfigError, match="has 2 experts a token, the model 3"):
        rerouted(source, 1, torch.zeros(4, 3, dtype=torch.int64))
