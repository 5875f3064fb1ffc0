"""The CPU computes some experts of a pass beside the device: any split gives the results of plain
PyTorch, whatever fails or is late meanwhile."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from overspill.compute.cpu_kernel import cpu_isa
from overspill.core.errors import EngineError, OrderError
from overspill.core.experts import Phase
from tests.moe.oracle import (
    N_EXPERTS,
    adamw,
    assert_follows,
    delays,
    loss_of,
    plain_run,
    train,
    train_step,
)
from tests.moe.streaming.frozen import (
    HOST,
    UPLOADERS,
    SmallTask,
    compute,
    cpu_jobs,
    cpu_settings,
    plain,
    traced,
    uploads,
)
from tests.moe.streaming.policies import all_on_cpu, fixed_policy, random_policy
from tests.slow import slow_rows

pytestmark = pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler")

# -- exactness --------------------------------------------------------------------------------

TASKS = {
    "gated": SmallTask(),
    "top 1, not gated": SmallTask(top_k=1, gated=False),
    "checkpointed": SmallTask(checkpoint=True),
    "some dense layers": SmallTask(n_layers=4, moe_every=2, frozen=(0, 1)),
}


@pytest.mark.parametrize(
    ("name", "where"),
    slow_rows([(name, HOST[(n + m) % 3]) for n, name in enumerate(TASKS) for m in (0, 1)], 1, 3, 7),
)
def test_any_split_gives_plain_logits_and_gradients(name: str, where: str, tmp_path: Path) -> None:
    task = TASKS[name]
    with traced(task, where, tmp_path, cpu_settings(random_policy(1))) as (model, engine):
        for _ in range(3):
            compute(model, task.tokens).assert_close(plain(task))
        jobs = cpu_jobs(engine)
    assert {job.split()[0] for job in jobs} == {"forward", "backward"}
    assert uploads(engine) > 0


@pytest.mark.parametrize(
    ("uploader", "where"), slow_rows(itertools.product(UPLOADERS, HOST), 1, 3, 5)
)
def test_any_split_is_exact_with_delays_and_several_threads(
    where: str, uploader: str, tmp_path: Path
) -> None:
    task, kinds = SmallTask(), set()
    late = delays(2, longest=1e-3)

    def inject(kind: str) -> None:
        kinds.add(kind)
        late(kind)

    settings = cpu_settings(random_policy(3), threads=3, uploader=uploader, inject=inject)
    with traced(task, where, tmp_path, settings) as (model, _):
        for _ in range(3):
            compute(model, task.tokens).assert_close(plain(task))
    assert {"cpu", "upload"} <= kinds


def test_bf16_is_as_near_to_plain_pytorch_as_without_cpu_experts(tmp_path: Path) -> None:
    task = SmallTask(dtype=torch.bfloat16)
    distances = []
    for policy in (fixed_policy(), all_on_cpu):
        with traced(task, HOST[1], tmp_path, cpu_settings(policy)) as (model, engine):
            distances.append(compute(model, task.tokens).distance(plain(task)))
            assert len(cpu_jobs(engine)) == (2 * task.n_layers if policy is all_on_cpu else 0)
    alone, on_cpu = distances
    assert on_cpu <= 1.25 * alone


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference_is_exact_and_training_may_follow(
    guard: Callable[[], Any], tmp_path: Path
) -> None:
    task = SmallTask()
    settings = cpu_settings(random_policy(4))
    with traced(task, HOST[1], tmp_path, settings) as (model, engine):
        for _ in range(3):
            with guard():
                logits = model(task.tokens[:, :-1]).logits
            torch.testing.assert_close(logits, plain(task).logits, rtol=1e-5, atol=1e-6)
        assert cpu_jobs(engine)
        compute(model, task.tokens).assert_close(plain(task))


def test_only_frozen_layers_are_computed_on_the_cpu_while_others_train(tmp_path: Path) -> None:
    task = SmallTask(frozen=(1,), steps=3, clip=0.5)
    settings = cpu_settings(random_policy(5), inject=delays(5, longest=1e-3))
    with traced(task, HOST[1], tmp_path, settings) as (model, engine):
        run = train(model, adamw(model, task), task)
        layers = {job.split(":")[0] for job in cpu_jobs(engine)}
    assert_follows(run, plain_run(task))
    assert layers == {"forward 1", "backward 1"}


def test_evaluation_sees_updates_that_are_pending(tmp_path: Path) -> None:
    """Experts whose update is pending go to the device, which waits for them."""
    task = SmallTask(frozen=(), steps=3)
    n_experts = task.n_layers * N_EXPERTS
    updates_wait, updates_may_end, updates = (
        threading.Event(),
        threading.Event(),
        itertools.count(),
    )

    def inject(kind: str) -> None:
        # not the first ones of a step: backward would wait for their gradient buffers
        if kind == "optimizer" and next(updates) % n_experts >= n_experts - 3:
            assert updates_may_end.wait(60)

    twin = task.model()
    twin_optimizer = torch.optim.AdamW(
        twin.parameters(), lr=task.lr, weight_decay=task.weight_decay
    )

    def choose(counts: Sequence[int], phase: Phase) -> frozenset[int]:
        if updates_wait.is_set():  # which of the chosen ones are readable is decided next
            updates_wait.clear()
            threading.Timer(0.1, updates_may_end.set).start()
        return all_on_cpu(counts, phase)

    settings = cpu_settings(choose, inject=inject)
    with traced(task, HOST[2], tmp_path, settings) as (model, engine):
        optimizer = adamw(model, task)
        for batch in task.batches():
            updates_may_end.clear()
            train_step(model, optimizer, batch)
            twin_optimizer.zero_grad()
            loss_of(twin, batch[0]).backward()
            twin_optimizer.step()
            before = uploads(engine)
            updates_wait.set()
            with torch.inference_mode():
                logits = model(task.tokens[:, :-1]).logits
                torch.testing.assert_close(
                    logits, twin(task.tokens[:, :-1]).logits, rtol=1e-4, atol=1e-5
                )
            assert uploads(engine) > before
            engine.flush()
            before, jobs = uploads(engine), len(cpu_jobs(engine))
            with torch.inference_mode():
                assert torch.allclose(model(task.tokens[:, :-1]).logits, logits, atol=1e-6)
            assert uploads(engine) == before, "all experts are readable now"
            assert len(cpu_jobs(engine)) == jobs + task.n_layers


def test_experts_of_the_cpu_are_not_uploaded(tmp_path: Path) -> None:
    task = SmallTask()
    with traced(task, HOST[1], tmp_path, cpu_settings(fixed_policy(0, 1))) as (model, engine):
        compute(model, task.tokens)  # the first forward knows nothing of the layers ahead
        engine.flush()
        engine.recorder.clear()
        for _ in range(2):
            compute(model, task.tokens)
        names = [span.name for span in engine.recorder.spans() if span.row == "upload"]
    assert {name.split()[1].split(".")[1] for name in names} == {"2", "3", "4"}
    assert any(name.endswith("by history") for name in names)


def test_a_pass_may_be_split_although_none_was_expected(tmp_path: Path) -> None:
    """By the passes before, the CPU gets no expert; by the routing, it does."""
    task = SmallTask()

    def choose(counts: Sequence[int], phase: Phase) -> frozenset[int]:
        return frozenset(range(N_EXPERTS)) if sum(counts) == 6 * task.top_k else frozenset()

    with traced(task, HOST[1], tmp_path, cpu_settings(choose)) as (model, engine):
        compute(model, task.tokens).assert_close(plain(task))
        assert not cpu_jobs(engine)
        expected = compute(task.model(), task.tokens[:, :7])
        compute(model, task.tokens[:, :7]).assert_close(expected)
        assert len(cpu_jobs(engine)) == 2 * task.n_layers


@pytest.mark.parametrize("resident", [1, N_EXPERTS])
def test_experts_of_the_cpu_may_move_to_the_device_between_forward_and_backward(
    resident: int, tmp_path: Path
) -> None:
    task = SmallTask()
    with traced(task, HOST[1], tmp_path, cpu_settings(fixed_policy(0, 2))) as (model, engine):
        model.register_forward_hook(lambda *_: engine.set_residents([resident] * task.n_layers))
        for _ in range(2):
            engine.set_residents([0] * task.n_layers)
            compute(model, task.tokens).assert_close(plain(task))
        jobs = cpu_jobs(engine)
    on_cpu = {job.split(": ")[1] for job in jobs if job.startswith("backward")}
    assert on_cpu == ({"2"} if resident == 1 else set())


# -- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_a_failure_in_the_runner_is_raised_once(failing: str, tmp_path: Path) -> None:
    task, fail = SmallTask(), threading.Event()

    def inject(kind: str) -> None:
        if kind == "cpu" and fail.is_set():
            raise OSError("no cores")

    settings = cpu_settings(all_on_cpu, inject=inject, threads=2)
    with traced(task, HOST[1], tmp_path, settings) as (model, _):
        for _ in range(2):
            if failing == "forward":
                fail.set()
            loss = model(task.tokens[:, :-1]).logits.sum() if failing == "backward" else None
            fail.set()
            with pytest.raises(OSError, match="no cores"):
                model(task.tokens[:, :-1]) if loss is None else loss.backward()
            fail.clear()
            compute(model, task.tokens).assert_close(plain(task))


class Interrupted(BaseException):
    pass


class InterruptAt(TorchDispatchMode):
    """Raises instead of the operation with this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left == 0:
            raise Interrupted
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pass_that_is_interrupted_anywhere_leaves_nothing_behind(
    every: int, tmp_path: Path
) -> None:
    task = SmallTask(n_layers=1, frozen=(0,))
    x = torch.randn(1, 8, task.config.d_model, requires_grad=True)

    def run(moe: nn.Module) -> tuple[Tensor, Tensor]:
        y = moe(x)[0]
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]

    expected = run(task.model().moe_layers()[0])
    settings = cpu_settings(fixed_policy(0, 1, 2, 3), inject=delays(6, longest=1e-4, only="cpu"))
    with traced(task, HOST[1], tmp_path, settings) as (model, engine):
        moe = model.moe_layers()[0]
        for number in itertools.count(1, every):
            try:
                with InterruptAt(number):
                    run(moe)
            except Interrupted:
                engine.flush()
                torch.testing.assert_close(run(moe), expected, rtol=1e-5, atol=1e-6)
            else:
                break
        assert every * len(cpu_jobs(engine)) > number > 50


def test_an_exception_in_a_later_layer_leaves_nothing_behind(tmp_path: Path) -> None:
    task = SmallTask()

    def fail(*_: object) -> None:
        raise ValueError("a hook")

    with traced(task, HOST[1], tmp_path, cpu_settings(random_policy(7))) as (model, _):
        for moe in model.moe_layers():
            hook = moe.register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="a hook"):
                model(task.tokens[:, :-1])
            hook.remove()
            compute(model, task.tokens).assert_close(plain(task))


def test_closing_between_two_layers_ends_the_pass(tmp_path: Path) -> None:
    task = SmallTask()
    with traced(task, HOST[1], tmp_path, cpu_settings(all_on_cpu), idle=False) as (model, engine):
        model.moe_layers()[1].register_forward_pre_hook(lambda *_: engine.close())
        with pytest.raises(OrderError, match="closed"):
            model(task.tokens[:, :-1])


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.01])
def test_closing_while_the_cpu_computes_ends_the_pass(seconds: float, tmp_path: Path) -> None:
    task, started, errors = SmallTask(), threading.Event(), []

    def inject(kind: str) -> None:
        started.set()
        time.sleep(0.001)

    def run(model: nn.Module) -> None:
        try:
            with torch.inference_mode():
                while True:
                    model(task.tokens[:, :-1])
        except (EngineError, OrderError) as error:
            errors.append(str(error))

    settings = cpu_settings(all_on_cpu, inject=inject, threads=2)
    with traced(task, HOST[1], tmp_path, settings, idle=False) as (model, engine):
        thread = threading.Thread(target=run, args=(model,))
        thread.start()
        assert started.wait(60)
        time.sleep(seconds)
        engine.close()
        thread.join(60)
        assert not thread.is_alive()
    assert "closed" in errors[0]


# -- the trace ---------------------------------------------------------------------------------


def test_the_trace_has_every_job_of_the_cpu(tmp_path: Path) -> None:
    task = SmallTask()
    with traced(task, HOST[1], tmp_path, cpu_settings(all_on_cpu)) as (model, engine):
        began = time.perf_counter_ns()
        with torch.no_grad():
            model(task.tokens[:, :-1])
        engine.recorder.stop()
        ended = time.perf_counter_ns()
        jobs = cpu_jobs(engine)
        spans = [span for span in engine.recorder.spans() if span.row == "cpu compute"]
    assert [job.split(":")[0] for job in jobs] == [f"forward {n}" for n in range(3)]
    for span in spans:
        n_experts = len(span.name.split(":")[1].split(","))
        assert span.bytes == n_experts * engine.layout.weight_bytes
        assert began < span.start_ns < span.end_ns < ended
