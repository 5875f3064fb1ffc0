"""Training with offloaded experts gives the losses and weights of plain PyTorch training."""

import functools
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.moe.settings import Settings
from tests.moe.oracle import (
    ONE_OF_EACH,
    STREAMED,
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    delays,
    loss_of,
    plain_run,
    spilled,
    spilled_run,
    streamed_run,
    train,
    weights_of,
)
from tests.slow import slow_names, slow_rows

TASKS = {
    "top-2 gated": Task(n_layers=3, steps=2),
    "clipped": Task(n_layers=2, clip=0.5, steps=2),
    "accumulated": Task(n_layers=2, top_k=1, gated=False, micro_batches=3, steps=2),
    "accumulated, clipped, checkpointed": Task(
        n_layers=2, micro_batches=2, clip=0.5, checkpoint=True, steps=2
    ),
    "checkpointed, every 2nd layer": Task(checkpoint=True, n_layers=4, moe_every=2, steps=2),
    "an expert without tokens": Task(starve=True, weight_decay=3.0, steps=2),
    "an expert without tokens, clipped": Task(
        n_layers=2, starve=True, weight_decay=3.0, clip=0.5, top_k=1, steps=2
    ),
}


# every task somewhere, and two of them everywhere
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *product(["top-2 gated", "accumulated, clipped, checkpointed"], ONE_OF_EACH),
        ("clipped", "host with 2 slots"),
        ("accumulated", "disk, 5 resident"),
        ("checkpointed, every 2nd layer", "disk, 5 resident"),
        ("an expert without tokens", "host with 2 slots"),
        ("an expert without tokens, clipped", "gpu"),
    ],
)
def test_training_follows_plain_pytorch(name: str, where: str, tmp_path: Path) -> None:
    task = TASKS[name]
    assert_follows(spilled_run(task, where, tmp_path), plain_run(task))


@pytest.mark.parametrize("where", slow_rows(["host with 2 slots", "disk behind 3 host slots"], 1))
def test_a_long_run_follows_plain_pytorch(where: str, tmp_path: Path) -> None:
    task = Task(n_layers=2, steps=6)
    assert_follows(spilled_run(task, where, tmp_path), plain_run(task))


SWITCHES: dict[str, dict[str, Any]] = {
    "activations kept": {"activations": "keep"},
    "waves off": {"waves": False},
    "updates not overlapped": {"overlap_updates": False},
    "uploads not overlapped": {"overlap_uploads": False},
    "all off": {"waves": False, "overlap_updates": False, "overlap_uploads": False},
}


@pytest.mark.parametrize(
    ("switch", "where"),
    [
        ("activations kept", "host with 5 slots"),
        pytest.param("activations kept", "disk behind 9 host slots", marks=pytest.mark.slow),
        ("waves off", "host with 5 slots"),
        ("updates not overlapped", "host with 5 slots"),
        pytest.param("updates not overlapped", "disk behind 9 host slots", marks=pytest.mark.slow),
        ("uploads not overlapped", "disk behind 9 host slots"),
        ("all off", "host with 5 slots"),
        pytest.param("all off", "disk behind 9 host slots", marks=pytest.mark.slow),
    ],
)
def test_no_switch_changes_the_results(switch: str, where: str, tmp_path: Path) -> None:
    on_disk = where.startswith("disk")
    task = Task(n_layers=3 if on_disk else 2, checkpoint=on_disk, steps=3)
    run = spilled_run(task, where, tmp_path, Settings(**SWITCHES[switch]))
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize(
    ("task", "switch"),
    [
        (Task(clip=0.5, steps=2), "activations kept"),
        (Task(n_layers=2, steps=3), "waves off"),
        (Task(n_layers=2, steps=3), "updates not overlapped"),
        (
            Task(n_layers=2, micro_batches=2, clip=0.5, checkpoint=True, steps=2),
            "updates not overlapped",
        ),
    ],
)
def test_switches_with_all_experts_on_the_device(task: Task, switch: str, tmp_path: Path) -> None:
    run = spilled_run(task, "gpu", tmp_path, Settings(**SWITCHES[switch]))
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize(
    ("where", "activations"),
    [
        ("gpu", "recompute"),
        ("gpu", "keep"),
        ("host with 2 slots", "recompute"),
        ("disk behind 3 host slots", "keep"),
    ],
)
def test_an_expert_whose_rows_are_cut_into_pieces_learns_the_same(
    where: str, activations: str, tmp_path: Path
) -> None:
    task = Task(n_layers=2, top_k=1, clip=0.5, steps=2)
    # 36 tokens on 5 experts: some get more than 4 rows in every step
    run = spilled_run(task, where, tmp_path, Settings(activations=activations), max_rows=4)
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize(
    "where", slow_names(STREAMED, "host with 12 slots", "disk behind 9 host slots")
)
def test_where_an_expert_is_changes_no_bit(where: str, tmp_path: Path) -> None:
    task = Task(n_layers=3, micro_batches=2, clip=0.5, steps=2)
    run = spilled_run(task, where, tmp_path)
    assert_same_bits(run, streamed_run(task))
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize(
    ("where", "task", "threads"),
    [
        ("host with 2 slots", Task(steps=2), 1),
        pytest.param("disk behind 3 host slots", Task(steps=2), 3, marks=pytest.mark.slow),
        ("host with 5 slots", Task(clip=0.5, top_k=1, steps=3), 1),
        pytest.param("host with 12 slots", Task(steps=2), 3, marks=pytest.mark.slow),
        pytest.param(
            "disk behind 9 host slots",
            Task(micro_batches=2, checkpoint=True, steps=2),
            1,
            marks=pytest.mark.slow,
        ),
        ("disk behind 3 host slots", Task(micro_batches=2, clip=0.5, starve=True, steps=2), 3),
    ],
)
def test_delayed_transfers_and_updates_change_no_bit(
    where: str, task: Task, threads: int, tmp_path: Path
) -> None:
    settings = Settings(inject=delays(seed=len(where)), threads=threads)
    run = spilled_run(task, where, tmp_path, settings)
    assert_follows(run, plain_run(task))
    assert_same_bits(run, streamed_run(task))


@pytest.mark.parametrize(
    "kind", slow_rows(["upload", "download", "optimizer", "ssd read", "ssd write"], 0, 3)
)
def test_one_kind_of_job_with_long_delays_changes_no_bit(kind: str, tmp_path: Path) -> None:
    task = Task(micro_batches=2, n_layers=2, steps=2)
    settings = Settings(inject=delays(seed=1, longest=0.01, only=kind))
    run = spilled_run(task, "disk behind 9 host slots", tmp_path, settings)
    assert_same_bits(run, streamed_run(task))


# -- bf16 -------------------------------------------------------------------------------------


@functools.cache
def plain_bf16(task: Task) -> Run:
    """bf16 weights, each rounded from an fp32 master that torch.optim.AdamW updates."""
    model, run = task.model(), Run()
    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=task.lr, weight_decay=task.weight_decay)
    for (tokens,) in task.batches():
        loss = loss_of(model, tokens)
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        if task.clip is not None:
            run.norms.append(torch.nn.utils.clip_grad_norm_(masters, task.clip).item())
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        run.losses.append(loss.item())
    run.weights = weights_of(model)
    return run


@pytest.mark.parametrize(
    ("where", "clip", "state_dtype"),
    [
        ("gpu", 0.5, torch.bfloat16),
        pytest.param("host with 2 slots", None, torch.bfloat16, marks=pytest.mark.slow),
        ("host, 5 resident", 0.5, torch.float32),
    ],
    ids=str,
)
def test_bf16_weights_have_an_fp32_master(
    where: str, clip: float | None, state_dtype: torch.dtype, tmp_path: Path
) -> None:
    # At this rate many updates are below half a digit of bf16. Tried on plain PyTorch without
    # masters, the losses are off by 4e-3 and the norms by 4e-2.
    task = Task(dtype=torch.bfloat16, clip=clip, steps=24, lr=2e-3, n_layers=1)
    expected = plain_bf16(task)
    model = task.model()
    with spilled(model, where, tmp_path):
        run = train(model, adamw(model, task, state_dtype=state_dtype), task)
    assert expected.losses[-1] < 0.95 * expected.losses[0]
    assert run.losses == pytest.approx(expected.losses, rel=1e-3)
    for name, weight in expected.weights.items():
        assert run.weights[name].dtype == torch.bfloat16
        norms = run.weights[name].float().norm().item(), weight.float().norm().item()
        assert norms[0] == pytest.approx(norms[1], rel=2e-2), name
