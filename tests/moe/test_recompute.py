"""Experts under torch.utils.checkpoint: exact, and their forward does not run a second time."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from overspill.core.experts import Phase
from overspill.models.gpt import GPTMoE
from overspill.moe import expert_pass
from overspill.moe.engine import Engine
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.settings import Settings
from tests.moe.oracle import (
    HOME_OR_NOT,
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    loss_of,
    plain_run,
    spilled,
    spilled_run,
    train,
    train_step,
    weights_of,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows


def count_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, Phase]]:
    """Counts the passes through each layer's experts in each phase from now on."""
    passes: Counter[tuple[int, Phase]] = Counter()
    waves = engine.compute.waves

    def counted(layer_pass: LayerPass, phase: Phase, *args: Any) -> Iterator[Wave]:
        passes[layer_pass.layer, phase] += 1
        return waves(layer_pass, phase, *args)

    monkeypatch.setattr(engine.compute, "waves", counted)
    return passes


@pytest.mark.parametrize("where", HOME_OR_NOT)
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_recomputed_block_stops_before_its_experts(
    where: str, pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(n_layers=3, checkpoint=True)
    model = task.model()
    computed = 0

    def counted(*args: Any) -> Any:
        nonlocal computed
        computed += 1
        return wave_forward(*args)

    wave_forward = expert_pass.wave_forward
    monkeypatch.setattr(expert_pass, "wave_forward", counted)
    with spilled(model, where, tmp_path) as engine:
        optimizer = adamw(model, task)
        passes = count_passes(engine, monkeypatch)
        (tokens,) = next(task.batches())
        loss = model(tokens[:, :-1], tokens[:, 1:], pieces).loss
        assert passes == {(layer, Phase.FORWARD): 1 for layer in range(3)}
        before = computed
        loss.backward()
        optimizer.step()
        assert computed == before > 0
        assert passes == {(layer, phase): 1 for layer in range(3) for phase in Phase}


def test_kept_activations_are_dropped_by_a_checkpoint_and_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(n_layers=3, checkpoint=True)
    model = task.model()
    with spilled(model, "host with 2 slots", tmp_path, Settings(activations="keep")) as engine:
        optimizer = adamw(model, task)
        passes = count_passes(engine, monkeypatch)
        train_step(model, optimizer, next(task.batches()))
        # once for the activations, once for the gradients
        assert passes == {
            (layer, phase): 1 + (phase is Phase.BACKWARD) for layer in range(3) for phase in Phase
        }


@pytest.mark.parametrize(
    ("where", "activations"),
    [
        ("gpu", "keep"),
        ("host with 2 slots", "recompute"),
        pytest.param("disk, 5 resident", "keep", marks=pytest.mark.slow),
        ("disk, 5 resident", "recompute"),
    ],
)
def test_a_checkpoint_changes_no_bit(where: str, activations: str, tmp_path: Path) -> None:
    task = Task(n_layers=2, steps=2, micro_batches=2, clip=0.5)
    settings = Settings(activations=activations)
    kept = spilled_run(task, where, tmp_path, settings)
    model = task.model()
    model.checkpoint = True
    with spilled(model, where, tmp_path, settings):
        assert_same_bits(train(model, adamw(model, task), task), kept)


def _reentrant(model: GPTMoE) -> None:
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)


@pytest.mark.parametrize("where", HOME_OR_NOT)
@pytest.mark.parametrize(
    ("task", "activations"),
    [
        (Task(n_layers=2, steps=2), "keep"),
        (Task(n_layers=2, steps=2, micro_batches=2, clip=0.5, top_k=1), "recompute"),
    ],
    ids=["one", "accumulated"],
)
def test_reentrant_checkpoints_are_exact_too(
    where: str, task: Task, activations: str, tmp_path: Path
) -> None:
    model = task.model()
    _reentrant(model)
    with spilled(model, where, tmp_path, Settings(activations=activations)):
        assert_follows(train(model, adamw(model, task), task), plain_run(task))


@pytest.mark.parametrize(
    ("where", "clip", "kind"),
    slow_rows(
        all_pairs(
            HOME_OR_NOT, [None, 0.5], ["none", "not reentrant", "reentrant", "around all layers"]
        ),
        0,
        2,
        6,
    ),
)
def test_two_forwards_and_one_backward_are_exact_under_every_checkpoint(
    where: str, clip: float | None, kind: str, tmp_path: Path
) -> None:
    task = Task(n_layers=2, micro_batches=2, steps=2, clip=clip, checkpoint=kind == "not reentrant")
    model, run = task.model(), Run()
    if kind == "reentrant":
        _reentrant(model)
    forward = loss_of
    if kind == "around all layers":
        forward = functools.partial(checkpoint, loss_of, use_reentrant=False)
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        for a, b in task.batches():
            loss = (forward(model, a) + forward(model, b)) / 2
            optimizer.zero_grad()  # drops no forward
            loss.backward()
            optimizer.step()
            run.losses.append(loss.item())
            if optimizer.total_norm is not None:
                run.norms.append(optimizer.total_norm)
        run.weights = weights_of(model)
    expected = plain_run(task)
    assert_follows(run, expected if clip is not None else replace(expected, norms=[]))


@pytest.mark.parametrize("where", HOME_OR_NOT)
def test_a_graph_of_reentrant_checkpoints_that_is_freed_changes_nothing(
    where: str, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=2)
    model, run = task.model(), Run()
    _reentrant(model)
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, task)
        for batches in task.batches():
            loss_of(model, batches[0].flip(1))
            run.losses.append(train_step(model, optimizer, batches))
        run.weights = weights_of(model)
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_experts_learn_where_their_inputs_need_no_gradient(
    activations: str, tmp_path: Path
) -> None:
    """Frozen dense weights: the gradient of the lowest layer ends in its experts."""
    task = Task(n_layers=2, steps=2)
    plain, model = task.model(), task.model()
    for each in (plain, model):
        each.embedding.weight.requires_grad_(False)
        each.blocks[0].attention.requires_grad_(False)
        each.blocks[0].attention_norm.requires_grad_(False)
        each.blocks[0].feed_norm.requires_grad_(False)
        each.blocks[0].moe.router.requires_grad_(False)
    torch_optimizer = torch.optim.AdamW(
        plain.parameters(), lr=task.lr, weight_decay=task.weight_decay
    )
    expected = Run()
    for (tokens,) in task.batches():
        loss = loss_of(plain, tokens)
        loss.backward()
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        expected.losses.append(loss.item())
    expected.weights = weights_of(plain)
    with spilled(model, "host with 2 slots", tmp_path, Settings(activations=activations)):
        assert_follows(train(model, adamw(model, task), task), expected)
