"""Popularity that is learned during training: what is predicted, and that nothing else changes."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.core.errors import ConfigError
from overspill.models import predictor as saved
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe import popularity
from overspill.moe.predictor import Observer, Predictor
from overspill.moe.rank_rows import RankRows
from overspill.moe.streaming.compute import StreamingCompute
from overspill.moe.streaming.cpu_split import CpuSplit
from overspill.moe.streaming.expected_counts import CountSource, ExpectedCounts
from overspill.moe.streaming.step_cursor import StepCursor
from overspill.plan.popularity import LearningPace, RowErrors
from tests.models.huggingface.families import make_model
from tests.models.huggingface.oracle import budgets
from tests.models.stages.staged import MIXTRAL, micro_batches, staged, train_staged
from tests.moe.streaming.policies import random_policy

CONFIG = GPTConfig(
    vocab=48, n_layers=4, d_model=16, d_hidden=24, n_heads=2, n_experts=8, top_k=2, max_seq=64
)


@pytest.fixture(autouse=True)
def always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learns from every pass: tests are too short for its share of the time."""
    monkeypatch.setattr(LearningPace, "allows", lambda *_: True)
    monkeypatch.setattr(saved, "cache_folder", lambda: tmp_path)


@contextmanager
def trained(
    plain: Any, folder: Path, kind: str, mode: str = "host", **options: Any
) -> Iterator[Any]:
    settings = overspill.Settings(popularity=kind, **options)
    model: Any = overspill.offload(
        copy.deepcopy(plain), settings=settings, **budgets(mode, folder / kind)
    )
    try:
        yield model
    finally:
        model.overspill.check_conserved()
        model.overspill.close()


def gpt(checkpoint: bool = False) -> GPTMoE:
    return GPTMoE(CONFIG, checkpoint=checkpoint, seed=1)


def gpt_loss(model: Any, step: int, rows: int = 3) -> Tensor:
    tokens = torch.randint(48, (rows, 17), generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:]).loss
    return loss


def hf_loss(model: Any, step: int) -> Tensor:
    (batch,) = micro_batches(1)
    loss: Tensor = model(**{name: value.roll(step) for name, value in batch.items()}).loss
    return loss


def train(model: Any, loss_of: Callable[[Any, int], Tensor], steps: int = 2) -> list[Tensor]:
    optimizer = overspill.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    losses = []
    for step in range(steps):
        with optimizer.accumulate():
            loss_of(model, 2 * step).backward()
        losses.append(loss_of(model, 2 * step + 1))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("checkpointed", "disk"),
        pytest.param("gpt", "host", marks=pytest.mark.slow),
        pytest.param("gpt", "disk", marks=pytest.mark.slow),
        pytest.param("mixtral", "host", marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_are_the_same_bits_as_with_history(
    family: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although uploads follow the predictions."""
    monkeypatch.setattr(RowErrors, "prefers_prediction", True)
    sources = _sources(monkeypatch)
    plain = make_model(MIXTRAL) if family == "mixtral" else gpt(family == "checkpointed")
    loss_of = hf_loss if family == "mixtral" else gpt_loss
    losses, weights = [], []
    for kind in ("history", "learned"):
        with trained(plain, tmp_path, kind, mode) as model:
            losses.append(train(model, loss_of))
            weights.append({name: value.clone() for name, value in model.state_dict().items()})
            observer = model.overspill.popularity.observer
            assert (observer is None) == (kind == "history")
            assert (CountSource.PREDICTION in sources) == (kind == "learned")
    assert all(map(torch.equal, *losses))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert observer.predictor.learned_tokens > 0


def _sources(monkeypatch: pytest.MonkeyPatch) -> set[CountSource]:
    """How the rows were known that uploads and the split between CPU and device followed."""
    found: set[CountSource] = set()
    expected = StepCursor.expected

    def noted(own: StepCursor, layer: int) -> Any:
        counts, source = expected(own, layer)
        found.add(source)
        return counts, source

    monkeypatch.setattr(StepCursor, "expected", noted)
    return found


def test_the_split_between_cpu_and_device_follows_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any split has the same results but for rounding."""
    monkeypatch.setattr(RowErrors, "prefers_prediction", True)
    planned: set[CountSource] = set()
    likely = CpuSplit.likely

    def noted(own: CpuSplit, layer: int) -> bool:
        planned.add(own._cursor.expected(layer)[1])
        return likely(own, layer)

    monkeypatch.setattr(CpuSplit, "likely", noted)
    options = {"cpu_experts": True, "cpu_training": True, "cpu_policy": random_policy(8)}
    losses = []
    for kind in ("history", "learned"):
        planned.clear()
        with trained(gpt(), tmp_path, kind, **options) as model:
            losses.append(train(model, gpt_loss))
    assert CountSource.PREDICTION in planned
    for first, second in zip(*losses, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 40])
def test_expected_rows_are_those_of_the_prediction(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naively: the most likely experts of each token that is looked at, one and two layers ahead,
    in proportion to all tokens."""
    monkeypatch.setattr(popularity, "PREDICT_TOKENS", 100)
    expected: list[tuple[int, list[float]]] = []
    told: list[tuple[int, list[float]]] = []
    learn, note = Observer.observe, ExpectedCounts.predict

    def observe(own: Observer, layer: int, x_TD: Tensor, *rest: Any) -> None:
        learn(own, layer, x_TD, *rest)
        every = -(-len(x_TD) // 100)
        seen = x_TD[::every]
        for distance in (1, 2):
            if layer + distance < CONFIG.n_layers:
                weight, bias = (
                    each[distance][layer] for each in (own.predictor.weights, own.predictor.biases)
                )
                ids = (seen @ weight.t() + bias).topk(2).indices
                counts = torch.bincount(ids.flatten(), minlength=8) * (len(x_TD) / len(seen))
                expected.append((layer + distance, counts.tolist()))

    def noted(own: ExpectedCounts, layer: int, counts: list[float]) -> None:
        told.append((layer, counts))
        note(own, layer, counts)

    monkeypatch.setattr(Observer, "observe", observe)
    monkeypatch.setattr(ExpectedCounts, "predict", noted)
    monkeypatch.setattr(ExpectedCounts, "wants_prediction", lambda *_: True)
    with trained(gpt(), tmp_path, "learned") as model, torch.no_grad():
        for step in range(2):
            gpt_loss(model, step, rows)
    assert len(told) == 2 * (3 + 2)
    for (layer, counts), (later, naive) in zip(told, expected, strict=True):
        assert layer == later
        assert counts == pytest.approx(naive)
        assert sum(counts) == pytest.approx(rows * 16 * 2)


def test_history_is_all_there_is_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is predicted")

    for kind, name in ((Predictor, "__init__"), (StreamingCompute, "predict")):
        monkeypatch.setattr(kind, name, never)
    with trained(gpt(), tmp_path, "history") as model:
        train(model, gpt_loss, steps=1)
        assert model.overspill.popularity.observer is None


def test_a_recomputed_forward_is_not_seen_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    learn = Observer.observe

    def observe(own: Observer, layer: int, *rest: Any) -> None:
        seen.append(layer)
        learn(own, layer, *rest)

    monkeypatch.setattr(Observer, "observe", observe)
    with trained(gpt(checkpoint=True), tmp_path, "learned") as model:
        train(model, gpt_loss, steps=1)
        assert model.overspill.popularity.observer.predictor.learned_tokens == 2 * 48
    assert seen == [0, 1, 2, 3] * 2


def test_in_stages_micro_batches_teach_within_a_stage(tmp_path: Path) -> None:
    plain, found = make_model(MIXTRAL), []
    for kind in ("history", "learned"):
        settings = overspill.Settings(popularity=kind)
        folder = tmp_path / kind
        with staged(2, "host", folder, settings=settings, model=plain) as (model, stages):
            optimizer = overspill.AdamW(model, lr=1e-3)
            train_staged(stages, model, optimizer, [micro_batches(3)] * 2)
            found.append({name: value.clone() for name, value in model.state_dict().items()})
            observer = model.overspill.popularity.observer
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert observer.predictor.learned_tokens > 0


def test_what_it_cannot_follow_is_refused() -> None:
    with pytest.raises(ConfigError, match="popularity='guess' must be one of 'history', 'learned'"):
        overspill.Settings(popularity="guess")
    with pytest.raises(ConfigError, match="does not support popularity='learned'"):
        RankRows.check(None, overspill.Settings(popularity="learned"))  # type: ignore[arg-type]
