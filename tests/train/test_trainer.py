import errno
import json
import math
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill import LLM
from overspill.core.errors import CheckpointError, ConfigError, DiskError, NonFiniteError
from overspill.models.predictor import new_observer
from overspill.train.config import TrainConfig
from overspill.train.metrics import read_lines
from overspill.train.run_spec import RunSpec
from overspill.train.session import Builder, Session, build_session
from overspill.train.summary import Summary
from overspill.train.train_spec import TrainSpec, plan_training
from overspill.train.trainer import train
from tests.full_disk import largest_file
from tests.train.fakes import FakeEngine, Watcher, build_fake, tiny_settings

BUILDERS = pytest.mark.parametrize(
    "build",
    [
        pytest.param(build_fake, id="plain", marks=pytest.mark.slow),
        pytest.param(build_session, id="offloaded"),
    ],
)


def _train(settings: dict[str, Any], display: Watcher, build: Builder = build_fake) -> Summary:
    return train(TrainConfig.make(settings), display, build)


@BUILDERS
@pytest.mark.usefixtures("pictures")
def test_a_run_leaves_everything_in_its_folder(tmp_path: Path, build: Builder) -> None:
    display = Watcher()
    summary = _train(tiny_settings(tmp_path, steps=12, lr=3e-2), display, build)
    run = tmp_path / "run"
    assert summary.steps == 12
    assert display.losses[-1] < display.losses[0] - 1
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000009",
        "step-00000012",
    ]
    assert json.loads((run / "config.json").read_text())["run"]["steps"] == 12
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = list(read_lines(run / "metrics.jsonl"))
    assert [line["loss"] for line in lines if "loss" in line] == display.losses
    assert [line["eval_loss"] for line in lines if "eval_loss" in line] == display.evals
    assert all(line["grad_norm"] > 0 for line in lines if "loss" in line)


@pytest.mark.usefixtures("pictures")
def test_the_timeline_of_an_offloaded_run_opens_and_no_thread_outlives_it(tmp_path: Path) -> None:
    from tests.trace.reader import read_perfetto

    before = set(threading.enumerate())
    _train(tiny_settings(tmp_path, steps=4, trace_steps=2), Watcher(), build_session)
    assert set(threading.enumerate()) <= before
    rows = {span.row for span in read_perfetto(tmp_path / "run" / "timeline.json.gz")}
    assert {"compute", "upload", "optimizer"} <= rows
    assert (tmp_path / "run" / "timeline.png").exists()
    lines = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert any(line.get("busy", {}).get("upload", 0) > 0 for line in lines)


@pytest.mark.usefixtures("pictures")
def test_learned_popularity_tells_its_accuracies_and_changes_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.models.predictor.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("overspill.plan.popularity.LearningPace.allows", lambda *_: True)
    losses = []
    for kind in ("history", "learned"):
        display = Watcher()
        options = {"out": str(tmp_path / kind), "steps": 2, "mode": "host", "popularity": kind}
        _train(tiny_settings(tmp_path, **options), display, build_session)
        losses.append(display.losses)
        told = [line.get("predictor") for line in read_lines(tmp_path / kind / "metrics.jsonl")]
        if kind == "history":
            assert not any(told)
            continue
        last = [each for each in told if each][-1]
        assert 0 < last["token_accuracy_1"] <= 1
        assert 0 <= last["expert_accuracy_1"] <= 1
        assert last["learned_tokens"] > 0
        with LLM(tmp_path / kind, device="cpu", context=16) as llm:  # the run's weights
            predictor = new_observer(llm.model, (1,)).predictor
            assert predictor.learned_tokens >= last["learned_tokens"]
    assert losses[0] == losses[1]


@pytest.mark.usefixtures("pictures")
def test_a_run_without_transfers_has_no_timeline(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, steps=2, trace_steps=2, slots=None, mode="gpu")
    _train(settings, Watcher(), build_session)
    assert not (tmp_path / "run" / "timeline.png").exists()


@pytest.mark.slow
@BUILDERS
def test_a_stopped_run_resumes_to_the_same_numbers(tmp_path: Path, build: Builder) -> None:
    straight = Watcher()
    _train(tiny_settings(tmp_path, out=str(tmp_path / "straight")), straight, build)

    def interrupt(step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    first = Watcher(interrupt)
    summary = _train(tiny_settings(tmp_path), first, build)
    assert summary.interrupted
    assert summary.steps == 5
    assert first.ended
    assert summary.lines()[-1].endswith(f"overspill train --resume --out {tmp_path}/run")

    second = Watcher()
    summary = _train(tiny_settings(tmp_path, resume=True), second, build)
    assert not summary.interrupted
    assert first.losses + second.losses == straight.losses
    assert first.evals + second.evals == straight.evals
    for file in ("model.safetensors", "optimizer.safetensors"):
        paths = [
            tmp_path / name / "checkpoints/step-00000008" / file for name in ("straight", "run")
        ]
        assert paths[0].read_bytes() == paths[1].read_bytes()
    runs = [list(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("straight", "run")]
    assert [line.get("loss") for line in runs[0]] == [line.get("loss") for line in runs[1]]


def test_sigterm_stops_like_ctrl_c_and_handlers_come_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = Watcher(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None)
    summary = _train(tiny_settings(tmp_path), stop)
    assert (summary.interrupted, summary.steps) == (True, 2)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_sigterm_that_a_job_manager_sends_to_launcher_and_ranks_counts_once(
    tmp_path: Path,
) -> None:
    """A rank gets two then: one from its launcher."""

    def terminate(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    summary = _train(tiny_settings(tmp_path), Watcher(terminate))
    assert (summary.interrupted, summary.steps) == (True, 2)


def test_a_second_ctrl_c_ends_at_once_and_closes_the_engine(tmp_path: Path) -> None:
    built: list[Session] = []

    def build(spec: RunSpec) -> Session:
        built.append(build_fake(spec))
        return built[0]

    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    display = Watcher(interrupt)
    with pytest.raises(KeyboardInterrupt):
        _train(tiny_settings(tmp_path), display, build)
    assert display.ended
    assert isinstance(built[0].engine, FakeEngine)
    assert built[0].engine.closed


@pytest.mark.parametrize("step", [2, 5])
def test_a_nan_stops_before_it_reaches_a_weight(tmp_path: Path, step: int) -> None:
    built: list[Session] = []

    def build(spec: RunSpec) -> Session:
        built.append(build_fake(spec))
        return built[0]

    def poison(done: int) -> None:
        if done == step:
            with torch.no_grad():
                next(built[0].model.parameters()).fill_(math.nan)

    where = "step-00000003" if step == 5 else "there is no checkpoint yet"
    with pytest.raises(NonFiniteError, match=rf"step {step + 1}: the loss is nan.*{where}.*--lr"):
        _train(tiny_settings(tmp_path), Watcher(poison), build)
    assert built[0].optimizer.dense_state_dict()["experts.step"] == step
    assert isinstance(built[0].engine, FakeEngine)
    assert built[0].engine.closed


@BUILDERS
def test_grouped_micro_batches_train_as_one_by_one(tmp_path: Path, build: Builder) -> None:
    grouped, single = Watcher(), Watcher()
    settings = {"accumulate": 3, "batch": 2, "steps": 3}
    _train(tiny_settings(tmp_path, out=str(tmp_path / "a"), **settings), grouped, build)
    _train(tiny_settings(tmp_path, out=str(tmp_path / "b"), group=False, **settings), single, build)
    assert grouped.losses == pytest.approx(single.losses, rel=1e-5)
    # Adam takes the same steps with all gradients times three
    norms = [
        [
            line["grad_norm"]
            for line in read_lines(tmp_path / out / "metrics.jsonl")
            if "loss" in line
        ]
        for out in "ab"
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_offloaded_training_follows_the_plain_model(tmp_path: Path) -> None:
    plain, offloaded = Watcher(), Watcher()
    settings = {"steps": 5, "weight_decay": 0.01, "beta2": 0.999}  # as torch's AdamW has them
    _train(tiny_settings(tmp_path, out=str(tmp_path / "a"), **settings), plain, build_fake)
    _train(tiny_settings(tmp_path, out=str(tmp_path / "b"), **settings), offloaded, build_session)
    assert offloaded.losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_run_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    _train(tiny_settings(tmp_path, steps=1), Watcher())
    with pytest.raises(ConfigError, match=r"already holds a run; add --resume"):
        _train(tiny_settings(tmp_path, steps=1), Watcher())


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    _train(tiny_settings(tmp_path, steps=3), Watcher())
    done = Watcher()
    assert _train(tiny_settings(tmp_path, steps=3, resume=True), done).steps == 3
    assert any("give a higher --steps" in line for line in done.lines)
    assert _train(tiny_settings(tmp_path, steps=5, resume=True), Watcher()).steps == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 8}, "was written with experts=4; this run has experts=8"),
        ({"d_model": 32}, "was written with d_model=16; this run has d_model=32"),
        ({"dtype": "bf16"}, "was written with dtype=float32; this run has dtype=bfloat16"),
        ({"seed": 1}, "was written with seed=0; this run has seed=1"),
    ],
)
def test_resuming_with_another_shape_is_refused_before_anything_is_built(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    _train(tiny_settings(tmp_path, steps=1), Watcher())

    def build(spec: RunSpec) -> Session:
        raise AssertionError("built")

    with pytest.raises(CheckpointError, match=message):
        _train(tiny_settings(tmp_path, resume=True, **change), Watcher(), build)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["experts"] == 4


def test_other_data_under_a_resumed_run_is_said(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, steps=1)
    _train(settings, Watcher())
    Path(settings["data"]).write_text("something else entirely\n" * 300)
    display = Watcher()
    _train({**settings, "steps": 2, "resume": True}, display)
    assert any("the data has changed" in line for line in display.lines)


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, steps=2)

    def again(step: int) -> None:
        with pytest.raises(ConfigError, match="is in use by another process"):
            _train({**settings, "resume": True}, Watcher())

    _train(settings, Watcher(again))


def test_a_run_that_begins_while_another_one_plans_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, plan = tiny_settings(tmp_path, steps=3), plan_training

    def slow_plan(*args: Any) -> TrainSpec:
        monkeypatch.setattr("overspill.train.trainer.plan_training", plan)
        _train(settings, Watcher())  # of another process
        return plan(*args)

    monkeypatch.setattr("overspill.train.trainer.plan_training", slow_plan)
    with pytest.raises(ConfigError, match="run already holds a run; add --resume"):
        _train({**settings, "steps": 8}, Watcher())
    assert len(list(read_lines(tmp_path / "run" / "metrics.jsonl"))) == 4  # with an evaluation
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


@pytest.mark.parametrize(
    ("limit", "message", "taken"),
    [
        (500, r"metrics.jsonl cannot be written \(File too large\)", 4),
        (20_000, r"model.safetensors: writing .* failed \(File too large\)", 6),
    ],
    ids=["for a line of the metrics", "for a checkpoint"],
)
def test_a_run_whose_disk_is_full_resumes_from_its_last_checkpoint(
    tmp_path: Path, limit: int, message: str, taken: int
) -> None:
    straight, first, second = Watcher(), Watcher(), Watcher()
    _train(tiny_settings(tmp_path, out=str(tmp_path / "straight")), straight)

    with ExitStack() as full:
        first = Watcher(lambda step: full.enter_context(largest_file(limit)) if step == 4 else None)
        with pytest.raises(DiskError, match=message):
            _train(tiny_settings(tmp_path), first)
    assert len(first.losses) == taken
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000003"]

    _train(tiny_settings(tmp_path, resume=True), second)
    assert second.losses == straight.losses[3:]
    runs = [list(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("straight", "run")]
    assert [line.get("loss") for line in runs[0]] == [line.get("loss") for line in runs[1]]


def test_a_run_ends_well_where_only_its_picture_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(metrics: Path, path: Path, title: str) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("overspill.train.loop.draw_loss", full)
    display = Watcher()
    summary = _train(tiny_settings(tmp_path, steps=1), display)
    assert (summary.steps, summary.interrupted) == (1, False)
    picture = tmp_path / "run" / "loss.png"
    assert not picture.exists()
    assert f"{picture} cannot be written (No space left on device)" in display.lines
