"""Residents that follow usage: experts are swapped between passes, and no bit changes."""

import copy
import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overspill.core.errors import ConfigError, OrderError
from overspill.models.gpt import GPTMoE
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from overspill.plan.usage import Swap
from tests.interrupts import calls_of, interrupted, spread
from tests.moe.oracle import (
    N_EXPERTS,
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    delays,
    loss_of,
    plain_run,
    spilled,
    train_step,
    weights_of,
)
from tests.moe.streaming.frozen import SmallTask
from tests.pairs import all_pairs
from tests.slow import slow_rows

WHERE = ["host, 7 resident", "disk, 5 resident"]
DTYPES = [torch.float32, torch.bfloat16]


def shuffle(engine: Engine, rng: random.Random) -> None:
    """Every resident expert that can is swapped with a streamed one."""
    found = []
    for layer, count in enumerate(engine.residents):
        streamed = rng.sample(range(count, N_EXPERTS), N_EXPERTS - count)
        found += [Swap(layer, a, b) for a, b in zip(range(count), streamed, strict=False)]
    engine.swap_experts(found)


def dense_parameters(model: GPTMoE) -> Iterator[Tensor]:
    return (p for p in model.parameters() if p.requires_grad)


def tune(model: GPTMoE, task: Task, engine: Engine | None = None) -> Run:
    """Trains all but the experts, which are swapped before every pass and before backward."""
    optimizer = torch.optim.AdamW(dense_parameters(model), lr=1e-2)
    run, rng = Run(), random.Random(0)
    for batches in task.batches():
        for tokens in batches:
            if engine is not None:
                shuffle(engine, rng)
            loss = loss_of(model, tokens)
            if engine is not None:
                shuffle(engine, rng)
            loss.backward()
            run.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    run.weights = weights_of(model)
    return run


@pytest.mark.parametrize(
    ("where", "dtype", "checkpoint"), slow_rows(all_pairs(WHERE, DTYPES, [False, True]), 0, 3)
)
def test_swaps_between_passes_change_no_bit_of_fine_tuning(
    where: str, dtype: torch.dtype, checkpoint: bool, tmp_path: Path
) -> None:
    task = SmallTask(
        n_layers=2, frozen=(0, 1), dtype=dtype, checkpoint=checkpoint, micro_batches=2, steps=2
    )
    model, still = task.model(), task.model()
    with spilled(model, where, tmp_path) as engine:
        run = tune(model, task, engine)
    with spilled(still, where, tmp_path):
        assert_same_bits(run, tune(still, task))
    if dtype == torch.float32:
        assert_follows(run, tune(task.model(), task))


@pytest.mark.parametrize(
    ("where", "dtype", "uploader"), all_pairs(WHERE, DTYPES, ["thread", "native"])
)
def test_swaps_between_passes_change_no_bit_of_inference(
    where: str, dtype: torch.dtype, uploader: str, tmp_path: Path
) -> None:
    if uploader == "native" and where.startswith("disk"):
        uploader = "auto"
    task, rng = Task(n_layers=2, dtype=dtype), random.Random(1)
    model = task.model().eval()
    expected = weights_of(model)
    inputs = [batch[:, :-1] for (batch,) in task.batches()]
    settings = Settings(uploader=uploader, inject=delays(seed=2, longest=1e-3))
    with torch.inference_mode():
        plain = [model(tokens).logits for tokens in inputs]
    with spilled(model, where, tmp_path, settings) as engine, torch.inference_mode():
        before = [model(tokens).logits for tokens in inputs]
        for tokens, logits, close in zip(inputs, before, plain, strict=True):
            shuffle(engine, rng)
            assert torch.equal(model(tokens).logits, logits)
            if dtype == torch.float32:
                torch.testing.assert_close(logits, close, rtol=1e-5, atol=1e-6)
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=expected))


@pytest.mark.parametrize("where", WHERE)
def test_state_dicts_and_loaded_weights_keep_their_names(where: str, tmp_path: Path) -> None:
    task, rng = SmallTask(), random.Random(0)
    model = task.model()
    first = weights_of(model)
    second = {name: value + 1 for name, value in first.items()}
    with spilled(model, where, tmp_path) as engine:
        for weights in (second, first):
            shuffle(engine, rng)
            model.load_state_dict(weights)
            shuffle(engine, rng)
            assert_same_bits(Run(weights=weights_of(model)), Run(weights=weights))


@pytest.mark.parametrize(("where", "clip"), slow_rows([(WHERE[0], None), (WHERE[1], 0.5)], 0))
def test_experts_that_were_swapped_can_be_trained(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    task, rng = Task(n_layers=3, clip=clip, steps=3), random.Random(0)
    runs = []
    for swapped in (True, False):
        model, run = task.model(), Run()
        with spilled(model, where, tmp_path) as engine:
            if swapped:
                shuffle(engine, rng)
            optimizer = adamw(model, task)
            for number, batches in enumerate(task.batches()):
                if number == 1:
                    engine.set_residents([1, 4, 2])
                run.losses.append(train_step(model, optimizer, batches))
                if optimizer.total_norm is not None:
                    run.norms.append(optimizer.total_norm)
            run.weights = weights_of(model)
            states = copy.deepcopy(optimizer.state_dict()["state"])
            if swapped:
                with pytest.raises(OrderError, match="optimizer states cannot be swapped"):
                    engine.swap_experts([Swap(0, 0, 4)])
        runs.append((run, states))
    (run, states), (other, others) = runs
    assert_same_bits(run, other)
    assert run.norms == other.norms
    assert_follows(run, plain_run(task))
    for number, found in states.items():
        for name, value in found.items():
            torch.testing.assert_close(value, others[number][name], rtol=0, atol=0)


def test_a_graph_that_is_kept_can_be_used_after_every_swap(tmp_path: Path) -> None:
    task, rng = SmallTask(), random.Random(0)
    model = task.model()
    with spilled(model, "host, 7 resident", tmp_path) as engine:
        loss, weight = loss_of(model, task.tokens), model.embedding.weight
        (expected,) = torch.autograd.grad(loss, weight, retain_graph=True)
        for _ in range(3):
            shuffle(engine, rng)
            assert torch.equal(torch.autograd.grad(loss, weight, retain_graph=True)[0], expected)
        engine.set_residents([N_EXPERTS] * 3)
        assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)


def test_kept_activations_of_experts_that_were_swapped_are_refused(
    tmp_path: Path,
) -> None:
    task, rng = SmallTask(), random.Random(0)
    model = task.model()
    settings = Settings(activations="keep")
    with spilled(model, "host, 7 resident", tmp_path, settings, idle=False) as engine:
        loss = loss_of(model, task.tokens)
        shuffle(engine, rng)
        with pytest.raises(OrderError, match=r"were swapped since .* run the forward again"):
            loss.backward()


def test_cpu_experts_follow_swaps(tmp_path: Path) -> None:
    task, rng = SmallTask(), random.Random(0)
    model, plain = task.model(), task.model()
    settings = Settings(cpu_experts=True, cpu_policy=lambda counts, phase: frozenset({2, 3, 4}))
    with spilled(model, "host, 7 resident", tmp_path, settings) as engine:
        run = tune(model, task, engine)
        engine.set_residents([1, 1, 1])
        shuffle(engine, rng)
        assert_follows(run, tune(plain, task))
        loss = loss_of(model, task.tokens)
        assert loss.item() == pytest.approx(loss_of(plain, task.tokens).item(), rel=1e-5)


@pytest.mark.parametrize("swap", [(0, 2, 3), (0, 0, 1), (0, 0, 5), (1, -1, 4), (3, 0, 4)])
def test_impossible_swaps_are_refused(swap: tuple[int, int, int], tmp_path: Path) -> None:
    with (
        spilled(Task(n_layers=3).model(), "host, 7 resident", tmp_path) as engine,
        pytest.raises(ConfigError, match=r"of 5 positions the first \[2, 2, 3\] of each layer"),
    ):
        engine.swap_experts([Swap(*swap)])


@pytest.mark.parametrize("where", slow_rows(WHERE, 0))
def test_an_interrupt_anywhere_in_a_swap_loses_nothing(where: str, tmp_path: Path) -> None:
    task = SmallTask(n_layers=2, frozen=(0, 1))
    model = task.model()
    weights = weights_of(model)
    with spilled(model, where, tmp_path, gpu_experts=4) as engine:
        expected = loss_of(model, task.tokens).item()

        def move() -> None:
            engine.swap_experts([Swap(layer, 0, b) for layer in (0, 1) for b in (4, 3)])

        for at in spread(calls_of(move), 20):
            interrupted(move, at)
            assert loss_of(model, task.tokens).item() == expected
        engine.check_conserved()
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=weights))


@pytest.mark.parametrize("where", slow_rows(WHERE, 1))
def test_a_failure_in_a_swap_loses_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = SmallTask()
    model = task.model()
    weights = weights_of(model)
    pairs = [Swap(layer, 0, 4) for layer in range(3)]
    with spilled(model, where, tmp_path) as engine:
        expected = loss_of(model, task.tokens).item()
        methods = {name: getattr(Tensor, name) for name in ("clone", "copy_", "to")}
        for (method, real), number in itertools.product(methods.items(), range(6)):
            left = number

            def fails(*args: Any, real: Any = real, **options: Any) -> Tensor:
                nonlocal left
                left -= 1
                if left == -1:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                return real(*args, **options)

            with monkeypatch.context() as patch:
                patch.setattr(Tensor, method, fails)
                try:
                    engine.swap_experts(pairs)
                except torch.OutOfMemoryError:
                    assert left < 0
            assert loss_of(model, task.tokens).item() == expected
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=weights))


class Uses:
    """A routing in which each pass uses the experts of the next one of some sets."""

    n_layers, n_experts, top_k = 1, N_EXPERTS, 2

    def __init__(self, used: list[set[int]]) -> None:
        self._used = itertools.cycle(used)

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> Tensor:
        ids = itertools.cycle(sorted(next(self._used)))
        return torch.tensor([[next(ids), next(ids)] for _ in range(n_tokens)])


def follow(
    used: list[set[int]], where: str, disk: Path, **options: Any
) -> tuple[list[set[int]], int]:
    """The resident experts in layer 0 after some passes in which experts are `used`, and how many
    swaps there were."""
    task = Task(n_layers=1)
    model, (tokens,) = task.model().eval(), next(task.batches())
    settings = Settings(follow_usage=True, **options)
    with spilled(model, where, disk, settings, gpu_experts=2) as engine, torch.no_grad():
        residents = [set(engine.addresses.resident[0])]
        with model.moe_layers()[0].experts.routed_by(Uses(used)):
            for _ in range(6):
                model(tokens[:, :-1])
                residents.append(set(engine.addresses.resident[0]))
    return residents, sum(len(after - before) for before, after in itertools.pairwise(residents))


@pytest.mark.parametrize("where", slow_rows(WHERE, 1))
def test_the_experts_with_most_tokens_move_to_the_device(where: str, tmp_path: Path) -> None:
    residents, swapped = follow([{3, 4}], where, tmp_path)
    assert residents[:2] == [{0, 1}, {0, 1}]
    assert residents[2:] == [{3, 4}] * 5
    assert swapped == 2


def test_places_follow_the_last_pass(tmp_path: Path) -> None:
    residents, _ = follow([{3, 4}, {1, 2}], "host, 7 resident", tmp_path)
    assert residents[2:] == [{3, 4}, {1, 2}, {3, 4}, {1, 2}, {3, 4}]


def test_kept_activations_keep_experts_in_place(tmp_path: Path) -> None:
    _, swapped = follow([{3, 4}], "host, 7 resident", tmp_path, activations="keep")
    assert swapped == 0


def test_trained_experts_stay_in_place(tmp_path: Path) -> None:
    task = Task(n_layers=2, steps=3, starve=True)
    model = task.model()
    settings = Settings(follow_usage=True)
    with spilled(model, "host, 7 resident", tmp_path, settings) as engine:
        optimizer = adamw(model, task)
        for batches in task.batches():
            train_step(model, optimizer, batches)
        assert engine.addresses.resident == [tuple(range(count)) for count in engine.residents]


def test_a_device_without_memory_for_a_swap_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def scarce(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with caplog.at_level(logging.INFO, logger="overspill"), monkeypatch.context() as patch:
        patch.setattr(Tensor, "clone", scarce)
        residents, _ = follow([{3, 4}], "host, 7 resident", tmp_path)
    assert residents[-1] == {0, 1}
    assert "no GPU memory left to swap experts" in caplog.text
