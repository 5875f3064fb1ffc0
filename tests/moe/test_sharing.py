"""CPU and device share the experts of a layer: any split gives what plain training gives."""

import gc
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from overspill.compute.cpu_kernel import cpu_kernel_name, delayed_tasks
from overspill.core.errors import EngineError
from overspill.core.experts import Phase
from overspill.hardware.profile import Curve, ExpertCosts
from overspill.moe import functions
from overspill.moe.course import Course
from overspill.moe.engine import Engine
from overspill.moe.host_job import Job
from overspill.moe.settings import Settings
from overspill.moe.sharing import Choose, Present, Sharing
from overspill.moe.streaming.engine import StreamingEngine
from overspill.transfer.lanes import Stamp
from tests.moe.oracle import (
    N_EXPERTS,
    WHERE,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    delays,
    loss_of,
    plain_run,
    spilled,
    spilled_run,
    train,
)

OFFLOADED = [name for name in WHERE if name != "gpu"]


def at_random(seed: int, share: float = 0.5) -> Choose:
    """Another split at every pass, whatever it costs."""
    numbers, lock = random.Random(seed), threading.Lock()

    def choose(counts: Sequence[int], present: Present, phase: Phase) -> frozenset[int]:
        with lock:
            return frozenset(
                i for i, count in enumerate(counts) if count and numbers.random() < share
            )

    return choose


def force(engine: Engine, choose: Choose) -> None:
    assert isinstance(engine, StreamingEngine)
    engine.sharing.on = True
    engine.sharing.choose = choose


def shared_run(task: Task, where: str, disk: Path, settings: Settings, choose: Choose):  # type: ignore[no-untyped-def]
    model = task.model()
    with spilled(model, where, disk, settings) as engine:
        force(engine, choose)
        run = train(model, adamw(model, task), task)
        spans = engine.recorder
    assert spans is not None
    return run


TASKS = {
    "plain": Task(),
    "clipped": Task(clip=0.5),
    "accumulated": Task(micro_batches=3),
    "accumulated and clipped": Task(micro_batches=2, clip=0.5),
    "checkpointed": Task(checkpoint=True),
    "starved": Task(starve=True),
    "top 1, not gated": Task(top_k=1, gated=False),
}


@pytest.mark.parametrize("where", OFFLOADED)
@pytest.mark.parametrize("name", TASKS)
def test_any_split_trains_as_plain_pytorch(name: str, where: str, tmp_path: Path) -> None:
    task = TASKS[name]
    run = shared_run(task, where, tmp_path, Settings(), at_random(3))
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize("where", OFFLOADED)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_any_split_is_exact_under_delays(where: str, share: float, tmp_path: Path) -> None:
    task = Task(steps=8, clip=0.5 if share == 1.0 else None)
    settings = Settings(inject=delays(5))
    run = shared_run(task, where, tmp_path, settings, at_random(4, share))
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize("where", ["host with 5 slots", "disk behind 9 host slots"])
def test_bf16_is_as_near_to_plain_training_as_without_a_split(where: str, tmp_path: Path) -> None:
    task = Task(steps=6, dtype=torch.bfloat16, lr=1e-3)
    alone = spilled_run(task, where, tmp_path)
    run = shared_run(task, where, tmp_path, Settings(), at_random(7))
    assert run.losses == pytest.approx(alone.losses, rel=2e-3)


def test_the_split_of_now_is_that_of_the_real_tokens(tmp_path: Path) -> None:
    """A wrong guess costs time: what was planned for the CPU but has many tokens goes up, and what
    is there already is not computed twice."""
    task = Task(steps=4)
    real: list[frozenset[int]] = []

    def wrong_ahead(counts: Sequence[int], present: Present, phase: Phase) -> frozenset[int]:
        real.append(frozenset(i for i, n in enumerate(counts) if n and (n + i) % 2))
        return real[-1]

    run = shared_run(task, "host with 12 slots", tmp_path, Settings(), wrong_ahead)
    assert_follows(run, plain_run(task))
    assert any(real)


@contextmanager
def shared(task: Task, disk: Path, choose: Choose, where: str = "host with 5 slots") -> Iterator:  # type: ignore[type-arg]
    model = task.model()
    with spilled(model, where, disk) as engine:
        force(engine, choose)
        yield model, engine


@contextmanager
def cores_lost() -> Iterator[None]:
    """Threads of the CPU's experts are away for long, each at one of some tasks."""
    if cpu_kernel_name() == "torch":
        pytest.skip("there is no compiler, so no such threads")
    with delayed_tasks(every=23, seconds=0.02) as repeated:
        yield
        assert repeated() > 0


@pytest.mark.parametrize("around", [nullcontext, cores_lost])
def test_frozen_experts_give_the_gradients_of_their_tokens(
    around: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    task = Task()
    tokens = next(iter(task.batches()))[0]
    plain = task.model()
    for moe in plain.moe_layers():
        moe.w_in.requires_grad_(False)
        moe.w_out.requires_grad_(False)
    loss_of(plain, tokens).backward()
    model = task.model()
    for moe in model.moe_layers():
        moe.w_in.requires_grad_(False)
        moe.w_out.requires_grad_(False)
    settings = Settings(threads=4)
    with spilled(model, "host with 5 slots", tmp_path, settings) as engine, around():
        force(engine, at_random(8))
        for _ in range(3):
            model.zero_grad()
            loss_of(model, tokens).backward()
            for name, parameter in model.named_parameters():
                if parameter.numel():
                    expected = plain.get_parameter(name).grad
                    torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("around", [nullcontext, cores_lost])
def test_inference_is_shared_too(
    around: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    task = Task()
    tokens = next(iter(task.batches()))[0]
    plain = task.model().eval()
    with torch.no_grad(), around():
        expected = plain(tokens).logits
        for where in OFFLOADED:
            model = task.model().eval()
            with spilled(model, where, tmp_path, Settings(threads=4)) as engine:
                force(engine, at_random(9))
                for _ in range(3):
                    torch.testing.assert_close(model(tokens).logits, expected)


def test_the_timeline_has_the_cpus_last_job_too(tmp_path: Path) -> None:
    if cpu_kernel_name() == "torch":
        pytest.skip("there is no compiler, so no runner")
    task = Task()
    tokens = next(iter(task.batches()))[0][:1, :6]  # few enough for the kernel
    with shared(task, tmp_path, at_random(1, share=1.1)) as (model, engine), torch.no_grad():
        engine.recorder.start()
        model(tokens)
        assert engine._host._number == 3, "all by the runner"
        engine.recorder.stop()
        spans = [span for span in engine.recorder.spans() if span.row == "cpu compute"]
    assert [span.name.split(":")[0] for span in spans] == [f"forward {n}" for n in range(3)]


def test_runs_that_are_to_repeat_to_the_bit_share_nothing() -> None:
    own = sharing()
    assert own.open
    torch.use_deterministic_algorithms(True)  # as late as that: a Trainer does
    try:
        assert not own.open
        assert not own.decide(1, [1] * N_EXPERTS, Phase.FORWARD)
    finally:
        torch.use_deterministic_algorithms(False)
    assert own.open


def test_all_experts_on_the_cpu_upload_nothing(tmp_path: Path) -> None:
    task = Task(steps=2)
    with shared(task, tmp_path, at_random(1, share=1.1)) as (model, engine):
        train(model, adamw(model, task), task)
        assert "upload" not in engine.recorder.counters()


def test_experts_of_the_cpu_are_not_uploaded_ahead(tmp_path: Path) -> None:
    """Experts 0 and 1 always stay: history and backward know it, nobody uploads them in vain."""
    task = Task(steps=3)

    def choose(counts: Sequence[int], present: Present, phase: Phase) -> frozenset[int]:
        return frozenset(i for i in (0, 1) if counts[i])

    with shared(task, tmp_path, choose) as (model, engine):
        optimizer = adamw(model, task)
        train(model, optimizer, Task(steps=1))  # nothing is known before the first pass
        engine.flush()
        engine.recorder.start()
        train(model, optimizer, task, first=1)
        names = [span.name for span in engine.recorder.spans() if span.row == "upload"]
        computed = [span.name for span in engine.recorder.spans() if span.row == "cpu compute"]
    experts = {name.split()[1].split(".")[1] for name in names}
    assert experts == {str(index) for index in range(2, N_EXPERTS)}
    assert computed
    assert any(name.endswith("real") for name in names)
    assert any(name.endswith(("predicted", "by history")) for name in names)


def test_the_same_split_gives_the_same_bits(tmp_path: Path) -> None:
    task = Task(steps=6)
    runs = [
        shared_run(task, where, tmp_path, Settings(inject=delays(seed)), _odd)
        for seed, where in enumerate(["host with 12 slots", "disk behind 9 host slots"])
    ]
    assert_same_bits(*runs)


def _odd(counts: Sequence[int], present: Present, phase: Phase) -> frozenset[int]:
    return frozenset(index for index in (1, 3) if counts[index])


def test_a_failure_on_the_cpu_reaches_the_caller(tmp_path: Path) -> None:
    def fail(kind: str) -> None:
        if kind == "cpu":
            raise OSError("no cores")

    task = Task()
    model = task.model()
    with spilled(model, "host with 5 slots", tmp_path, Settings(inject=fail), idle=False) as engine:
        force(engine, at_random(2, share=1.1))
        with pytest.raises(EngineError, match="no cores"):
            train(model, adamw(model, task), task)


# -- the policy's inputs ----------------------------------------------------------------------


def costs(**changes: object) -> ExpertCosts:
    from overspill.core.experts import ExpertShape

    flat = Curve((1, 64), (0.5e-3, 0.6e-3))
    values: dict[str, object] = {
        "shape": ExpertShape(8, 8, False),
        "dtype": "bfloat16",
        "threads": 1,
        "load": 0.34e-3,
        "load_beside": 0.36e-3,
        "cpu_forward": flat,
        "cpu_backward": flat,
        "cpu_beside": 1.2,
        "gpu_forward": Curve((1,), (0.02e-3,)),
        "gpu_backward": Curve((1,), (0.04e-3,)),
        "round_trip": 0.1e-3,
    }
    return ExpertCosts(**{**values, **changes})  # type: ignore[arg-type]


def sharing(uploaded: Collection[int] = ()) -> Sharing:
    course = Course(2, 16)
    return Sharing(course, costs(), 4096, lambda layer: Present(set(), set(uploaded)))


def test_training_with_adam_on_the_cores_leaves_them_alone() -> None:
    own = sharing()
    own.trained = True
    assert not own.open
    assert own.decide(0, [3] * 16, Phase.FORWARD) == frozenset()
    own.trained = False
    assert own.decide(0, [3] * 16, Phase.FORWARD)


def test_backward_uploads_nothing_that_the_forwards_split_will_compute_on_the_cpu() -> None:
    own = sharing()
    counts = [8] * 16
    own.course.enter(0, Phase.FORWARD, counts, training=True)
    # not what a fresh split would choose first, but as many
    number = len(own.decide(0, counts, Phase.FORWARD))
    before = own._forward[0] = frozenset(range(16 - number, 16))
    own.course.enter(1, Phase.FORWARD, [3] * 16, training=True)
    assert before.isdisjoint(own.uploads(0, range(16)))
    own.course.enter(0, Phase.BACKWARD, counts, training=True)
    assert own.decide(0, counts, Phase.BACKWARD, before) == before


def test_a_split_of_forward_is_not_kept_for_experts_that_were_uploaded() -> None:
    own = sharing(uploaded={15})
    counts = [8] * 16
    before = own.decide(0, counts, Phase.FORWARD)
    again = own.decide(0, counts, Phase.BACKWARD, before - {min(before)} | {15})
    assert again
    assert 15 not in again


def test_history_says_what_to_upload_ahead_most_popular_first() -> None:
    own = sharing()
    counts = [2] * 16
    counts[9], counts[4] = 500, 400
    own.course.enter(1, Phase.FORWARD, counts, training=False)
    own.course.enter(0, Phase.FORWARD, [3] * 16, training=False)
    ahead = own.uploads(1, range(16))
    assert ahead[:2] == [9, 4]
    assert 2 < len(ahead) < 16
    assert own.uploads(1, range(8))[0] == 4


def test_off_everything_goes_to_the_device_in_order() -> None:
    own = sharing()
    own.on = False
    own.course.enter(0, Phase.FORWARD, [1, 0, *[3] * 14], training=False)
    assert own.decide(0, [1, 0, *[3] * 14], Phase.FORWARD) == frozenset()
    assert own.uploads(0, range(16)) == [0, *range(2, 16)]


def test_the_cpu_takes_what_was_left_to_it_whatever_was_uploaded_ahead() -> None:
    """The link has done its part for this layer and goes on with the next: to divide the rest again
    would leave the CPU with less and less."""
    ahead = sharing().decide(0, [8] * 16, Phase.FORWARD)
    rest = set(range(16)) - ahead
    assert sharing(rest).decide(0, [8] * 16, Phase.FORWARD) == ahead


def test_a_layer_that_gave_the_cpu_nothing_is_not_likely_to() -> None:
    own = sharing()
    assert own.likely(0), "nothing is known yet"
    own.course.enter(0, Phase.FORWARD, [4000] * 16, training=False)
    assert not own.likely(0)
    own.course.enter(1, Phase.FORWARD, [4] * 16, training=False)
    assert own.likely(1)


@pytest.mark.parametrize("where", ["host with 5 slots", "disk behind 9 host slots"])
def test_the_runner_computes_what_is_not_learnt_and_lies_in_host_memory(
    where: str, tmp_path: Path
) -> None:
    if cpu_kernel_name() == "torch":
        pytest.skip("there is no compiler, so no runner")
    task = Task(steps=3)
    with shared(task, tmp_path, at_random(5), where) as (model, engine):
        engine.recorder.start()
        train(model, adamw(model, task), task)
        host = engine._host
        names = [span.name for span in engine.recorder.spans() if span.row == "cpu compute"]
        assert (host._number > 0) == where.startswith("host")
        gaps = engine.sharing._gaps
        assert (Phase.FORWARD in gaps) == where.startswith("host"), (
            "it sees what lies between layers"
        )
        assert all(0 < seconds < 1 for seconds in gaps.values())
    assert any(name.startswith("forward") for name in names)
    assert any(name.startswith("backward") for name in names)


def test_the_time_between_layers_counts_as_time_the_cpu_cannot_help() -> None:
    own = sharing()
    counts = [8] * 16
    alone = own.decide(0, counts, Phase.FORWARD)
    for _ in range(50):
        own.note_gap(Phase.FORWARD, 2e-3)
    fewer = own.decide(0, counts, Phase.FORWARD)
    assert 0 < len(fewer) < len(alone)
    assert own.decide(0, counts, Phase.BACKWARD) == alone, "it is known for each direction"
    for _ in range(50):
        own.note_gap(Phase.FORWARD, 20e-3)
    assert not own.decide(0, counts, Phase.FORWARD)


def test_a_gap_that_keeps_the_cpu_idle_is_forgotten_in_time() -> None:
    """While the CPU gets nothing nobody measures it."""
    own = sharing()
    own.note_gap(Phase.FORWARD, 5.0)
    assert own.decide(0, [8] * 16, Phase.FORWARD), "one is not believed"
    for _ in range(50):
        own.note_gap(Phase.FORWARD, 5.0)
    passes = 0
    while not own.decide(0, [8] * 16, Phase.FORWARD):
        passes += 1
        assert passes < 500
    assert passes > 20


def test_the_way_to_the_cpu_is_the_least_that_was_seen_lately() -> None:
    own = sharing()
    assert own._costs_of(Phase.FORWARD).fixed == own.costs.round_trip
    for seconds in (3.0, 4e-5, 5e-3, 5e-3):  # the device was the last three times
        own.note_handover(seconds)
    assert own._costs_of(Phase.FORWARD).fixed == pytest.approx(4e-5 * 1.01**2)
    for _ in range(1000):
        own.note_handover(5e-3)
    assert own._costs_of(Phase.FORWARD).fixed == own.costs.round_trip, "never more than measured"


def test_a_gap_lies_between_two_layers_in_a_row_and_nowhere_else() -> None:
    def job(entered: int, layer: int, phase: Phase = Phase.FORWARD) -> Job:
        there = Stamp(torch.device("cpu"))
        places = slice(0, 1), {0: (0, 1)}
        return Job(None, entered, layer, phase, None, *places, sent=there, taken=there)  # type: ignore[arg-type]

    first = job(7, 3)
    assert job(8, 4).follows(first)
    assert not job(8, 4, Phase.BACKWARD).follows(first)
    assert not job(40, 4).follows(first), "a pass later, and nothing shared in between"
    assert not job(8, 0).follows(first), "the next batch, after who knows what"
    first.taken = None
    assert not job(8, 4).follows(first), "it was given up"


def test_cores_that_give_less_than_they_were_measured_to_get_less() -> None:
    own = sharing()
    counts = [8] * 16
    alone = own.decide(0, counts, Phase.FORWARD)
    measured = own._measured((Phase.FORWARD, False)).cpu(8)
    for _ in range(50):
        own.note_job(Phase.FORWARD, [8] * 3, 3 * measured)
    assert own.decide(0, counts, Phase.FORWARD) == alone, "as it was measured"
    for _ in range(50):
        own.note_job(Phase.FORWARD, [8] * 3, 1.5 * 3 * measured)
    fewer = own.decide(0, counts, Phase.FORWARD)
    assert 0 < len(fewer) < len(alone)
    for _ in range(50):
        own.note_job(Phase.FORWARD, [8] * 3, 1.0)
    passes = 0
    while not own.decide(0, counts, Phase.FORWARD):
        passes += 1
        assert passes < 1000
    assert passes > 20, "and they are tried again in time"


def test_a_split_of_forward_is_not_kept_where_none_is_better() -> None:
    own = sharing()
    before = own.decide(0, [8] * 16, Phase.FORWARD)
    assert before
    for _ in range(50):
        own.note_gap(Phase.BACKWARD, 20e-3)
    assert own.decide(0, [8] * 16, Phase.BACKWARD, before) == frozenset()


def test_what_every_token_count_needs_is_no_guess() -> None:
    own = sharing()
    assert not own.takes_all(1), "nothing is known"
    own.course.enter(1, Phase.FORWARD, [4] * 16, training=False)
    own.course.enter(0, Phase.FORWARD, [4] * 16, training=False)
    assert not own.takes_all(1), "some may go to the CPU"
    own.on = False
    assert own.takes_all(1)
    for _ in range(3):
        own.course.enter(1, Phase.FORWARD, [0, *[4] * 15], training=False)
    own.course.enter(0, Phase.FORWARD, [4] * 16, training=False)
    assert not own.takes_all(1), "one may be needed after all"


# -- what once went wrong ---------------------------------------------------------------------


def test_rows_that_a_wave_has_left_are_there_for_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two host rows, and the CPU's expert the last of its layer, nobody else moves rows."""
    wave_forward = functions.wave_forward

    def slow(*args: object, **options: object) -> object:
        time.sleep(0.01)
        return wave_forward(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(functions, "wave_forward", slow)
    task = Task()
    tokens = next(iter(task.batches()))[0]
    model = task.model().eval()
    with torch.no_grad():
        expected = model(tokens).logits
    options = {"host_slots": 2, "settings": Settings(resident_share=0.0)}
    with spilled(model, "disk behind 3 host slots", tmp_path, **options) as engine, torch.no_grad():
        force(engine, lambda counts, *_: frozenset([i for i, n in enumerate(counts) if n][-1:]))
        for _ in range(5):
            torch.testing.assert_close(model(tokens).logits, expected)


def test_nothing_is_shared_where_activations_are_kept(tmp_path: Path) -> None:
    """A recomputation is split anew, and what is kept of it would lie in another order."""
    task = Task(steps=4, checkpoint=True)
    model = task.model()
    with spilled(model, "host with 5 slots", tmp_path, Settings(activations="keep")) as engine:
        force(engine, at_random(6))
        run = train(model, adamw(model, task), task)
        assert engine._host is None
    assert_follows(run, plain_run(task))


def test_a_backward_that_is_given_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(steps=1, clip=0.5)
    tokens = next(iter(task.batches()))[0]
    plain = task.model()
    loss_of(plain, tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item()
    wave_backward = functions.wave_backward

    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("pretended")

    model = task.model()
    settings = Settings(inject=delays(3, longest=0.2, only="cpu"))
    with spilled(model, "host with 5 slots", tmp_path, settings) as engine:
        force(engine, lambda counts, *_: frozenset(i for i in (0, 1) if counts[i]))
        optimizer = adamw(model, task)
        loss = loss_of(model, tokens)
        monkeypatch.setattr(functions, "wave_backward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        monkeypatch.setattr(functions, "wave_backward", wave_backward)
        del loss
        optimizer.zero_grad()
        engine.check_conserved()
        loss_of(model, tokens).backward()
        optimizer.step()
        assert optimizer.total_norm == pytest.approx(norm, rel=1e-6)


def test_training_goes_on_after_an_evaluation_in_inference_mode(tmp_path: Path) -> None:
    task = Task(steps=3)
    with shared(task, tmp_path, at_random(4)) as (model, _):
        with torch.inference_mode():
            model(next(iter(task.batches()))[0])
        run = train(model, adamw(model, task), task)
    assert_follows(run, plain_run(task))


def test_a_graph_that_is_thrown_away_is_noticed(tmp_path: Path) -> None:
    task = Task(steps=1)
    tokens = next(iter(task.batches()))[0]
    with shared(task, tmp_path, at_random(4, share=1.1)) as (model, engine):
        optimizer = adamw(model, task)
        loss = loss_of(model, tokens)
        del loss
        gc.collect()
        assert not any(engine._open)
        loss_of(model, tokens).backward()
        optimizer.step()


def test_what_is_not_shared_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Task().model()
    caplog.set_level("INFO", logger="overspill")
    with spilled(model, "host with 5 slots", tmp_path):
        assert "no GPU to share them with" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
