"""Saving: one whole checkpoint is there at any moment, and nothing of anybody else's is touched."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import overspill
from overspill.core.errors import ConfigError, DiskError, OrderError
from overspill.tiers.aside import temporary_folder
from tests.models.huggingface.families import make_batch, make_model
from tests.models.huggingface.oracle import budgets
from tests.models.huggingface.test_exactness import BY_NAME

MIXTRAL = BY_NAME["mixtral"]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    made = overspill.offload(make_model(MIXTRAL), **budgets("host", tmp_path))
    yield made
    made.overspill.close()


def train(model: Any, optimizer: overspill.AdamW) -> None:
    model(**make_batch(MIXTRAL, model)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def plainly(folder: Path) -> dict[str, Tensor]:
    """The weights as transformers loads them."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


class Killed(BaseException):
    pass


def dying_at(number: int, function: Callable[..., Any], calls: list[None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            raise Killed
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    "single",
    [
        pytest.param(True, id="over one file", marks=pytest.mark.slow),
        pytest.param(False, id="over shards"),
    ],
)
def test_killed_at_any_moment_one_checkpoint_is_whole(
    model: Any, single: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if single:
        make_model(MIXTRAL).save_pretrained(out)
    else:
        model.save_pretrained(out, max_shard_size="100KB")
    before = plainly(out)
    train(model, overspill.AdamW(model, lr=1e-2))
    now = dict(model.state_dict())
    for number in range(1, 100):
        calls: list[None] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", dying_at(number, os.replace, calls))
            patch.setattr(Path, "unlink", dying_at(number, Path.unlink, calls))
            try:
                model.save_pretrained(out, max_shard_size="100KB")
                break
            except Killed:
                pass
        found = plainly(out)
        assert same(found, before) or same(found, now), f"killed at {number}"
    assert number > 4
    assert same(plainly(out), now)
    shards = sorted(out.glob("*.safetensors"))
    assert {f"-of-{len(shards):05d}" in shard.name for shard in shards} == {True}


def test_what_a_killed_save_left_goes_with_the_next(model: Any, tmp_path: Path) -> None:
    for leftover in (tmp_path / ".tmp-out", tmp_path / "there" / ".tmp-checkpoint"):
        leftover.mkdir(parents=True)
        (leftover / "half").touch()
    for name in ("out", "there"):
        model.save_pretrained(tmp_path / name)
        assert not list((tmp_path / name).glob(".tmp*"))
    assert not list(tmp_path.glob(".tmp*"))


def test_files_of_others_stay(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "out")
    mine = ["notes.txt", "model_ema.safetensors", "model-averaged.safetensors"]
    for name in mine:
        save_file({"x": torch.ones(1)}, tmp_path / "out" / name)
    model.save_pretrained(tmp_path / "out")
    assert all((tmp_path / "out" / name).is_file() for name in mine)


def test_a_link_stays_a_link(model: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "to new").symlink_to(tmp_path / "new")
    for link, folder in (("link", "real"), ("to new", "new")):
        model.save_pretrained(tmp_path / link)
        assert (tmp_path / link).is_symlink()
        assert same(plainly(tmp_path / folder), model.state_dict())


@pytest.mark.parametrize("exists", [False, True])
def test_two_processes_do_not_save_to_one_folder_at_once(
    exists: bool, model: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    temporary = out / ".tmp-checkpoint" if exists else tmp_path / ".tmp-out"
    with (
        temporary_folder(temporary),  # of another process
        pytest.raises(ConfigError, match="is being written by another process"),
    ):
        overspill.save(model, out)
    overspill.save(model, out)
    assert same(plainly(out), model.state_dict())


def test_not_between_backward_and_step(model: Any, tmp_path: Path) -> None:
    optimizer = overspill.AdamW(model)
    model(**make_batch(MIXTRAL, model)).loss.backward()
    with pytest.raises(OrderError, match=r"cannot be saved between backward and step.*opt\.step"):
        overspill.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    optimizer.step()
    overspill.save(model, tmp_path / "out")
    assert same(plainly(tmp_path / "out"), model.state_dict())


def test_a_disk_that_is_full_for_the_dense_part(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import modeling_utils

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(modeling_utils, "safe_save_file", full)
    with pytest.raises(DiskError, match=r"out cannot be written \(No space left"):
        model.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "asked",
    [
        {"push_to_hub": True},
        {"variant": "fp8"},
        {"save_original_format": False},
        {"state_dict": {"x": torch.zeros(1)}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_it_cannot_do_is_refused(model: Any, tmp_path: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(asked))):
        model.save_pretrained(tmp_path / "out", **asked)
    assert not (tmp_path / "out").exists()


def test_the_default_said_aloud_is_no_other(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "out", save_original_format=True, push_to_hub=False)
    assert same(plainly(tmp_path / "out"), dict(model.state_dict()))
