import dataclasses
import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from overspill.core.errors import CheckpointError, DiskError
from overspill.models.gpt import GPTMoE
from overspill.train import checkpoint
from overspill.train.checkpoint import TrainState
from overspill.train.session import Session
from tests.train.fakes import TINY, make_session

FACTS: dict[str, checkpoint.Fact] = {"experts": 4, "dtype": "float32", "gated": False}


def _state(step: int) -> TrainState:
    return TrainState(step=step, position=step * 8, data_digest="abc", facts=FACTS)


def _save(folder: Path, session: Session, step: int = 1, keep: int = 2) -> Path:
    return checkpoint.save(
        folder, _state(step), session.model, session.engine, session.optimizer, keep
    )


def _load(path: Path, session: Session) -> TrainState:
    return checkpoint.load(path, session.model, session.engine, session.optimizer)


def _step(session: Session, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (2, 8), generator=generator)
    loss = session.model(tokens, tokens).loss
    loss.backward()
    session.optimizer.step()
    session.optimizer.zero_grad()
    return float(loss.item())


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_been(tmp_path: Path) -> None:
    straight = make_session()
    for i in range(3):
        _step(straight, i)
    path = _save(tmp_path, straight, step=3)
    expected = [_step(straight, i) for i in range(3, 6)]
    resumed = make_session(seed=99)
    assert _load(path, resumed) == _state(3)
    assert [_step(resumed, i) for i in range(3, 6)] == expected


def test_the_plain_model_loads_the_weights(tmp_path: Path) -> None:
    session = make_session()
    _step(session, 0)
    path = _save(tmp_path, session)
    plain = GPTMoE(TINY, seed=5)
    plain.load_state_dict(load_file(path / "model.safetensors"), strict=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, session.model.state_dict()[name]), name


def test_random_generators_continue_and_nothing_is_pickled(tmp_path: Path) -> None:
    session = make_session()
    path = _save(tmp_path, session)
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.rand(7), random.random(), np.random.rand(3)
    _load(path, session)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected
    assert sorted(file.name for file in path.iterdir()) == [
        "model.safetensors", "optimizer.safetensors", "state.json",
    ]  # fmt: skip
    json.loads((path / "state.json").read_text())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    session = make_session()
    for step in (8, 9, 10, 100_000_000):
        _save(tmp_path, session, step)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000010", "step-100000000"]
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.name == "step-100000000"


def test_leftovers_of_a_killed_run_are_ignored_and_cleaned(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-00000009-77").mkdir()
    assert checkpoint.newest(tmp_path) is None
    path = _save(tmp_path, make_session(), step=3)
    assert list(tmp_path.iterdir()) == [path]


def test_an_old_checkpoint_that_is_a_link_goes_and_its_files_stay(tmp_path: Path) -> None:
    """It was moved to another disk."""
    session, folder = make_session(), tmp_path / "checkpoints"
    old = _save(folder, session, step=1)
    moved = old.rename(tmp_path / old.name)
    old.symlink_to(moved, target_is_directory=True)
    assert _load(old, session).step == 1
    newer = [_save(folder, session, step) for step in (2, 3)]
    assert sorted(folder.iterdir()) == newer
    assert len(list(moved.iterdir())) == 3


def test_a_newest_checkpoint_that_links_to_nothing_is_named(tmp_path: Path) -> None:
    _save(tmp_path, make_session(), step=1)
    link = tmp_path / "step-00000002"
    link.symlink_to(tmp_path / "gone")
    message = "step-00000002 is a link to .*gone, .*remove the link to resume from step-00000001"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.newest(tmp_path)
    link.rename(tmp_path / "step-00000000")  # an older one does not matter
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000001"


def test_an_old_checkpoint_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, real = make_session(), os.rename
    old = [_save(tmp_path, session, step) for step in (1, 2)]

    def rename(source: Path, target: Path) -> None:
        if source == old[0]:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    message = r"old checkpoint .*1 cannot be removed \(Operation not permitted\), the new one is"
    with pytest.raises(DiskError, match=message):
        _save(tmp_path, session, step=3)
    assert _load(tmp_path / "step-00000003", session).step == 3


class Killed(BaseException):
    """Ends a save as SIGKILL would: no handler of ours catches it."""


_CALLS = ("mkdir", "rename", "fsync", "pwrite", "posix_fallocate", "unlink", "rmdir", "open")


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Dies at the n-th system call that changes the disk."""
    left = [-1]
    for name in _CALLS:
        original: Any = getattr(os, name)

        def call(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise Killed
            return _original(*args, **kwargs)

        monkeypatch.setattr(os, name, call)
    yield lambda count: left.__setitem__(0, count)
    left[0] = -1


def test_a_kill_at_any_system_call_leaves_a_whole_checkpoint(
    tmp_path: Path, kill_at: Callable[[int], None]
) -> None:
    session = make_session(dataclasses.replace(TINY, n_layers=1, moe_every=1, n_experts=2, top_k=1))
    seen = set()
    _save(tmp_path / "first", session, step=1, keep=1)
    for moment in range(1000):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "first", folder)
        kill_at(moment)
        try:
            _save(folder, session, step=2, keep=1)
        except Killed:
            finished = False
        else:
            finished = True
        kill_at(-1)
        newest = checkpoint.newest(folder)
        assert newest is not None
        seen.add(_load(newest, session).step)
        _save(folder, session, step=3, keep=1)
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]
        if finished:
            break
    assert finished
    assert moment > 50
    assert seen == {1, 2}


def test_a_full_disk_keeps_the_last_checkpoint_and_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session()
    kept = _save(tmp_path, session, step=1)
    real, count = os.pwrite, [0]

    def full(fd: int, data: Any, offset: int) -> int:
        count[0] += 1
        if count[0] > 5:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskError, match="No space left on device"):
        _save(tmp_path, session, step=2)
    assert list(tmp_path.iterdir()) == [kept]
    assert _load(kept, session).step == 1


def test_an_interrupt_keeps_the_last_checkpoint_and_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session()
    kept = _save(tmp_path, session, step=1)

    def interrupted(fd: int, data: Any, offset: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _save(tmp_path, session, step=2)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_checkpoint_of_another_shape_names_what_differs(tmp_path: Path) -> None:
    path = _save(tmp_path, make_session())
    checkpoint.check_fits(path, FACTS)
    message = "was written with experts=4; this run has experts=8"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check_fits(path, {**FACTS, "experts": 8})


def test_a_model_of_another_shape_is_refused_by_its_tensors_too(tmp_path: Path) -> None:
    path = _save(tmp_path, make_session())
    wider = make_session(dataclasses.replace(TINY, n_experts=8))
    with pytest.raises(CheckpointError, match=r"router.weight should be .*\[8, 16\].*\[4, 16\]"):
        _load(path, wider)
    deeper = make_session(dataclasses.replace(TINY, n_layers=2))
    with pytest.raises(CheckpointError, match="which this model does not have"):
        _load(path, deeper)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_truncated_file_is_named_with_the_way_out(tmp_path: Path, file: str) -> None:
    session = make_session()
    _save(tmp_path, session, step=1)
    path = _save(tmp_path, session, step=2)
    os.truncate(path / file, 100)
    message = f"step-00000002 is corrupt: {file} is truncated.*resume from step-00000001"
    with pytest.raises(CheckpointError, match=message):
        _load(path, session)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a checkpoint of overspill"),
        ("{", "is corrupt: state.json cannot be parsed"),
        ("[]", "is not a checkpoint of overspill"),
        ('{"format": "other"}', "is not a checkpoint of overspill"),
        ('{"format": "overspill-checkpoint", "version": 9}', "has format version 9"),
        ('{"format": "overspill-checkpoint", "version": 1}', "state.json has no step"),
    ],
)
def test_a_foreign_folder_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "step-00000001"
    path.mkdir()
    if content is not None:
        (path / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_state(path)
