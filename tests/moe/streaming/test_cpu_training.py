"""The CPU computes some of the experts that are trained, and forms the gradients of their weights:
any split trains as plain PyTorch does, whatever fails or is late meanwhile."""

import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from overspill.compute.cpu_kernel import GradientKind, WeightGradient, cpu_isa
from overspill.core.errors import ConfigError, NonFiniteError
from overspill.core.experts import Phase
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import CpuPolicy, Settings
from overspill.moe.streaming import formed_gradients
from overspill.moe.streaming.formed_gradients import FormedGradients
from overspill.optim.updates import FactorRows, Updates
from overspill.tiers.entry import Entry
from overspill.transfer.downloads import GradientRing
from tests.moe.oracle import (
    Run,
    adamw,
    assert_follows,
    delays,
    loss_of,
    plain_run,
    train,
    train_step,
    weights_of,
)
from tests.moe.streaming.frozen import HOST, SmallTask, cpu_jobs, cpu_settings, traced, uploads
from tests.moe.streaming.policies import all_on_cpu, fixed_policy, random_policy
from tests.slow import slow_rows

pytestmark = pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler")

WAYS = "forward", "backward"
TASKS = {
    "updated in backward": SmallTask(frozen=()),
    "clipped, not gated": SmallTask(frozen=(), clip=0.5, gated=False, top_k=1),
    "accumulated": SmallTask(frozen=(), micro_batches=3),
    "accumulated, clipped, checkpointed": SmallTask(
        frozen=(), micro_batches=3, clip=0.5, checkpoint=True
    ),
    "an expert without tokens": SmallTask(frozen=(), starve=True, clip=0.5),
    "a frozen layer": SmallTask(frozen=(1,), micro_batches=2),
}


def training(policy: CpuPolicy, **options: Any) -> Settings:
    return cpu_settings(policy, cpu_training=True, **options)


def moments(model: GPTMoE, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments of all parameters; after the first step a tenth of the gradients, clipped. Those
    of a layer's experts are one tensor of their records."""
    names = [name for name, _ in model.named_parameters()]
    states = optimizer.state_dict()["state"]
    found = {names[number]: torch.as_tensor(state["exp_avg"]) for number, state in states.items()}
    for name in [name for name in found if name.endswith(".w_in")]:
        parts = found.pop(name), found.pop(name.replace("w_in", "w_out"))
        found[name.replace("w_in", "experts")] = torch.cat([p.flatten(1) for p in parts], dim=1)
    return found


@functools.cache
def plain_moments(task: SmallTask) -> dict[str, Tensor]:
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    batch = next(task.batches())
    for tokens in batch:
        (loss_of(model, tokens) / len(batch)).backward()
    if task.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
    optimizer.step()
    return moments(model, optimizer)


@pytest.mark.parametrize(("number", "name"), slow_rows(enumerate(TASKS), 2, 4))
def test_any_split_trains_as_plain_pytorch(number: int, name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    settings = training(random_policy(number))
    with traced(task, HOST[number % 3], tmp_path, settings) as (model, engine):
        optimizer = adamw(model, task)
        run = Run([train_step(model, optimizer, next(task.batches()))])
        run.norms += [] if optimizer.total_norm is None else [optimizer.total_norm]
        got, expected = moments(model, optimizer), plain_moments(task)
        assert got.keys() == expected.keys()
        for which, moment in expected.items():
            error = (got[which] - moment).norm()
            assert error <= 1e-5 * moment.norm(), which
        rest = train(model, optimizer, task, first=1)
        jobs = cpu_jobs(engine)
    run = Run(run.losses + rest.losses, run.norms + rest.norms, rest.weights)
    assert_follows(run, plain_run(task))
    directions = {job.split(":")[0] for job in jobs}
    assert directions == {f"{way} {n}" for way in WAYS for n in range(3)}
    assert uploads(engine) > 0


@pytest.mark.parametrize(
    ("clip", "micro_batches"), [(None, 1), (0.5, 2), pytest.param(None, 3, marks=pytest.mark.slow)]
)
def test_any_split_is_exact_with_delays_and_several_threads(
    clip: float | None, micro_batches: int, tmp_path: Path
) -> None:
    task = SmallTask(frozen=(), clip=clip, micro_batches=micro_batches)
    settings = training(random_policy(7), threads=3, inject=delays(8, longest=1e-3))
    with traced(task, HOST[1], tmp_path, settings) as (model, _):
        run = train(model, adamw(model, task), task)
    assert_follows(run, plain_run(task))


def test_without_cpu_training_trained_experts_stay_on_the_device(tmp_path: Path) -> None:
    task = SmallTask(frozen=(1,))
    with traced(task, HOST[1], tmp_path, cpu_settings(all_on_cpu)) as (model, engine):
        train(model, adamw(model, task), task)
        assert {job.split(":")[0] for job in cpu_jobs(engine)} == {"forward 1", "backward 1"}


def test_cpu_training_without_cpu_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set cpu_experts=True too \(--cpu-experts\)"):
        Settings(cpu_training=True)


def test_gradients_of_the_cpu_are_not_downloaded(tmp_path: Path) -> None:
    task = SmallTask(frozen=(), clip=0.5)
    settings = training(fixed_policy(0, 1))
    with traced(task, HOST[1], tmp_path, settings) as (model, engine):
        train(model, adamw(model, task), task)
        names = [span.name for span in engine.recorder.spans() if span.row == "download"]
        on_cpu = [job for job in cpu_jobs(engine) if job.startswith("backward")]
    assert {name.split(".")[-1] for name in names} == {"2", "3", "4"}
    assert len(on_cpu) > task.steps


def test_experts_share_ring_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clipping their gradients have no memory of their own."""
    taken, take = [], GradientRing.take
    monkeypatch.setattr(GradientRing, "take", lambda ring: taken.append(ring) or take(ring))
    task = SmallTask(frozen=(), n_layers=1)
    with traced(task, HOST[1], tmp_path, training(all_on_cpu)) as (model, engine):
        run = train(model, adamw(model, task), task)
        jobs = [job for job in cpu_jobs(engine) if job.startswith("backward")]
    assert_follows(run, plain_run(task))
    on_cpu = sum(job.count(",") + 1 for job in jobs)
    on_device = 5 * task.steps - on_cpu  # those with more than five of sixteen rows
    assert on_cpu >= 3 * task.steps
    assert len(taken) <= 2 * task.steps + on_device, "a buffer takes ten rows"


@pytest.mark.parametrize("clip", [None, 0.5])
def test_factors_become_gradients_where_others_are_added(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the device, and of too many rows."""
    kinds, formed, place, form = set(), [], FormedGradients._place, Updates._form

    def noted_place(self: FormedGradients, entry: Entry, rows: int) -> WeightGradient:
        found = place(self, entry, rows)
        kinds.add(found.kind)
        return found

    def noted_form(self: Updates, entry: Entry, kept: Tensor, rows: FactorRows) -> None:
        formed.append(rows)
        form(self, entry, kept, rows)

    monkeypatch.setattr(formed_gradients, "_MOST", 0.4)
    monkeypatch.setattr(FormedGradients, "_place", noted_place)
    monkeypatch.setattr(Updates, "_form", noted_form)
    task = SmallTask(frozen=(), n_layers=2, micro_batches=4, clip=clip)
    with traced(task, HOST[1], tmp_path, training(random_policy(3))) as (model, _):
        run = train(model, adamw(model, task), task)
    assert_follows(run, plain_run(task))
    assert kinds == set(GradientKind)
    assert len(formed) > task.steps


def test_forwards_know_what_the_cores_owe_to_the_optimizer(tmp_path: Path) -> None:
    """Their own updates, or their share of all that are pending."""
    gate, task = threading.Event(), SmallTask(frozen=(), clip=0.5)
    gate.set()

    def inject(kind: str) -> None:
        if kind == "optimizer":
            assert gate.wait(60)

    settings = training(fixed_policy(), inject=inject)  # the CPU gets no experts
    with traced(task, HOST[1], tmp_path, settings) as (model, engine):
        optimizer = adamw(model, task)
        train_step(model, optimizer, next(task.batches()))
        engine.flush()
        streaming: Any = engine.compute.streaming
        loss_of(model, task.tokens).backward()
        gate.clear()
        optimizer.step()
        each = streaming.gradients.copies.updates.seconds
        with streaming._store.sync.lock:
            seconds = [streaming.seconds(layer, Phase.FORWARD, False) / each for layer in range(3)]
        gate.set()
        optimizer.zero_grad()
    assert seconds == pytest.approx([5, 7.5, 15])


def test_bf16_is_as_near_to_float32_as_without_cpu_experts(tmp_path: Path) -> None:
    wide, task = (
        SmallTask(frozen=(), clip=0.5),
        SmallTask(frozen=(), clip=0.5, dtype=torch.bfloat16),
    )
    errors = []
    for settings in (Settings(), training(all_on_cpu)):
        with traced(task, HOST[1], tmp_path, settings) as (model, engine):
            optimizer = adamw(model, task)
            train_step(model, optimizer, next(task.batches()))
            got = moments(model, optimizer)
            assert bool(cpu_jobs(engine)) == settings.cpu_training
        pairs = [(got[name].float(), moment) for name, moment in plain_moments(wide).items()]
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in pairs if b.norm() > 0))
    assert errors[1] <= 1.25 * errors[0]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_gradient_that_is_not_finite_updates_nothing(clip: float | None, tmp_path: Path) -> None:
    task = SmallTask(frozen=(), clip=clip)
    slow = delays(3, longest=5e-3, only="optimizer")
    with traced(task, HOST[1], tmp_path, training(all_on_cpu, inject=slow)) as (model, engine):
        optimizer = adamw(model, task)
        before = weights_of(model)
        (loss_of(model, task.tokens) * float("nan")).backward()
        with pytest.raises(NonFiniteError):
            optimizer.step()
        engine.flush()
        for name, weight in weights_of(model).items():
            assert not weight.isnan().any(), name
            assert weight.dim() == 3 or torch.equal(weight, before[name]), name
        optimizer.zero_grad()
        loss = train_step(model, optimizer, [task.tokens])
        assert loss == pytest.approx(loss_of(task.model(), task.tokens).item(), rel=1e-2)


def test_after_a_failure_in_the_runner_the_step_can_be_repeated(tmp_path: Path) -> None:
    task, fail = SmallTask(frozen=(), clip=0.5, n_layers=1), threading.Event()

    def inject(kind: str) -> None:
        if kind == "cpu" and fail.is_set():
            raise OSError("no cores")

    settings = training(all_on_cpu, inject=inject, threads=2)
    with traced(task, HOST[1], tmp_path, settings) as (model, _):
        optimizer = adamw(model, task)
        loss = loss_of(model, task.tokens)
        fail.set()
        with pytest.raises(OSError, match="no cores"):
            loss.backward()
        fail.clear()
        optimizer.zero_grad()
        run = train(model, optimizer, task)
    assert_follows(run, plain_run(task))
