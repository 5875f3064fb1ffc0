"""Engines with the native uploader: same bits as with the thread uploader, and clean failures."""

import errno
import functools
import time
from pathlib import Path

import pytest

import overspill
from overspill.core.errors import ConfigError, EngineError
from overspill.models.gpt import GPTMoE
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from overspill.transfer.upload_thread import upload_library
from tests.moe.oracle import (
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    delays,
    plain_run,
    spilled,
    spilled_run,
    train_step,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows

pytestmark = pytest.mark.skipif(upload_library() is None, reason="no C++ compiler")

TASKS = {
    "plain": Task(steps=3),
    "clipped, accumulated, checkpointed": Task(
        n_layers=2, steps=2, clip=0.5, micro_batches=2, checkpoint=True
    ),
    "an expert without tokens": Task(n_layers=2, steps=3, starve=True, weight_decay=3.0),
}


@functools.cache
def by_thread(task: Task, where: str) -> Run:
    return spilled_run(task, where, Path("unused"), Settings(uploader="thread"))


@pytest.mark.parametrize(
    ("name", "where", "late"),
    slow_rows(
        all_pairs(list(TASKS), ["host with 2 slots", "host with 12 slots"], [False, True]), 0, 3
    ),
)
def test_training_gives_the_bits_of_the_thread_uploader(
    name: str, where: str, late: bool, tmp_path: Path
) -> None:
    task = TASKS[name]
    settings = Settings(uploader="native", inject=delays(seed=6) if late else None)
    run = spilled_run(task, where, tmp_path, settings)
    assert_same_bits(run, by_thread(task, where))
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize("switch", slow_rows([{"overlap_uploads": False}, {"waves": False}], 1))
def test_switches_change_no_bit(switch: dict[str, bool], tmp_path: Path) -> None:
    task = TASKS["plain"]
    settings = Settings(uploader="native", inject=delays(seed=7, only="upload"), **switch)
    run = spilled_run(task, "host with 5 slots", tmp_path, settings)
    assert_same_bits(run, by_thread(task, "host with 2 slots"))


def test_delays_reach_the_native_thread(tmp_path: Path) -> None:
    seen: list[str] = []
    settings = Settings(uploader="native", inject=seen.append)
    spilled_run(Task(n_layers=2, steps=1), "host with 2 slots", tmp_path, settings)
    assert {"upload", "download", "optimizer"} <= set(seen)


@pytest.mark.parametrize(
    ("kind", "after", "where"),
    all_pairs(["upload", "optimizer"], [0, 7, 25], ["host with 2 slots", "host with 12 slots"]),
)
def test_a_failure_is_raised_once_and_the_engine_closes(
    kind: str, after: int, where: str, tmp_path: Path
) -> None:
    seen = 0

    def fail(what: str) -> None:
        nonlocal seen
        if what == kind:
            seen += 1
            if seen > after:
                raise OSError(errno.EIO, "injected")

    task = Task(steps=3)
    model = task.model()
    settings = Settings(uploader="native", inject=fail)
    began = time.monotonic()
    with spilled(model, where, tmp_path, settings, idle=False) as engine:
        optimizer = adamw(model, task)
        with pytest.raises(EngineError, match="injected") as caught:
            _train(model, optimizer, task, engine)
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(EngineError, match="injected"):
            engine.flush()
    assert time.monotonic() - began < 50, "not found by the watchdog"


def _train(model: GPTMoE, optimizer: overspill.AdamW, task: Task, engine: Engine) -> None:
    for batch in task.batches():
        train_step(model, optimizer, batch)
    engine.flush()


def test_a_native_uploader_that_is_not_possible_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"uploader='native' .*uploader='auto'"):
        overspill.offload(
            Task().model(),
            device="cpu",
            mode="disk",
            slots=3,
            host_slots=3,
            disk=tmp_path,
            settings=Settings(uploader="native"),
            quiet=True,
        )
    assert not list(tmp_path.iterdir())
