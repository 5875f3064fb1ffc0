"""Arguments that cannot work raise an error that names the fix, and leave nothing behind."""

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import overspill
from overspill.core.errors import BudgetError, ConfigError, DiskError
from overspill.moe.settings import Settings
from overspill.plan.budget import PROCESS
from overspill.transfer.mapped import can_map
from tests.moe.oracle import (
    Run,
    Task,
    adamw,
    assert_same_bits,
    spilled,
    threads_left,
    train_step,
    weights_of,
)

TASK = Task(steps=4)
CLIPPED = Task(steps=4, clip=0.5)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not threads_left()
    assert not list(tmp_path.glob("overspill-*")), "files were left on the disk"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"gpu_memory": "4KiB"}, r"--gpu-memory 4KiB .* give at least"),
        ({"slots": 1}, r"slots=1 \(--slots\) .* give 2"),
        ({"mode": "host", "host_memory": "1MiB"}, r"--host-memory 1MiB .* --disk"),
        ({"mode": "host", "host_memory": "1000TiB"}, r"--host-memory .* lower it"),
        ({"mode": "disk"}, r"--disk FOLDER"),
        ({"mode": "disk", "disk": "", "host_memory": "1GiB"}, r"--host-memory .* give at least"),
        (
            {"mode": "disk", "disk": "", "host_slots": 1},
            r"host_slots=1 \(--host-slots\) is too few .* at least 2",
        ),
    ],
    ids=str,
)
def test_a_budget_that_is_too_small_names_flag_and_fix(
    options: dict[str, Any], names: str, tmp_path: Path
) -> None:
    if "disk" in options:
        options = {**options, "disk": tmp_path}
    model = TASK.model()
    before = weights_of(model)
    with pytest.raises(BudgetError, match=names) as caught:
        overspill.offload(model, device="cpu", quiet=True, **options)
    assert "\n" not in str(caught.value)
    # the model is as it was, and can be offloaded with better numbers
    assert_same_bits(Run(weights=weights_of(model)), Run(weights=before))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"gpu_memory": "lots"}, "--gpu-memory='lots' is not a size"),
        ({"host_memory": 0}, "--host-memory=0 must be more than zero"),
        ({"mode": "hots"}, "mode='hots' must be one of 'auto', 'gpu', 'host', 'disk'"),
        ({"device": "cuda"}, "use device='cpu'"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_right_is_named(options: dict[str, Any], names: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=names):
        overspill.offload(TASK.model(), quiet=True, **{"device": "cpu", **options})


@pytest.mark.parametrize(
    "options",
    [
        {"activations": "kep"},
        {"threads": 0},
        {"max_rows": 0},
        {"uploader": "gpu"},
        {"exchange_groups": 0},
        {"exchange_groups": 2.5},
        {"received_rows": "host"},
    ],
)
def test_settings_that_cannot_be_right_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Settings(**options)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"state_dtype": torch.float16}, "state_dtype"),
        ({"lr": -1.0}, "lr"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_optimizer_values_that_cannot_be_right_are_named(
    options: dict[str, Any], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        overspill.AdamW(TASK.model(), **options)


def test_a_model_is_offloaded_once(tmp_path: Path) -> None:
    model = TASK.model()
    with (
        spilled(model, "host with 2 slots", tmp_path),
        pytest.raises(ConfigError, match="offload it once"),
    ):
        overspill.offload(model, device="cpu", quiet=True)


def test_a_model_without_experts_is_named() -> None:
    with pytest.raises(ConfigError, match="no Mixture-of-Experts layer"):
        overspill.offload(nn.Linear(3, 3), device="cpu", quiet=True)


def test_one_optimizer_takes_one_model(tmp_path: Path) -> None:
    one, two = TASK.model(), TASK.model()
    with (
        spilled(one, "gpu", tmp_path),
        spilled(two, "gpu", tmp_path),
        pytest.raises(ConfigError, match="one offloaded model"),
    ):
        overspill.AdamW([*one.parameters(), *two.parameters()])


def test_optimizer_states_of_other_groups_are_refused(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path):
        states = adamw(model, TASK).state_dict()
        optimizer = overspill.AdamW([{"params": [p]} for p in model.parameters()])
        with pytest.raises(ConfigError, match="other parameter groups"):
            optimizer.load_state_dict(states)


def _offload_to(disk: Path) -> None:
    options = {"device": "cpu", "mode": "disk", "slots": 3, "host_slots": 3, "quiet": True}
    overspill.offload(TASK.model(), disk=disk, **options)


def test_a_disk_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskError, match=r"file/spill is not writable.* --disk"):
        _offload_to(tmp_path / "file" / "spill")


def test_a_disk_that_says_it_is_full_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.statvfs(tmp_path)
    full = os.statvfs_result((*stat[:4], 0, *stat[5:]))  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises((DiskError, BudgetError), match=r"0 B free.* --host-memory"):
        _offload_to(tmp_path)


def _no_space(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_during_allocation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _no_space)
    with pytest.raises(DiskError, match=r"\(No space left on device\).* --disk"):
        _offload_to(tmp_path)


def test_a_disk_without_space_for_the_states_is_named_by_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TASK.model()
    with spilled(model, "disk behind 3 host slots", tmp_path) as engine:
        before = weights_of(model)
        monkeypatch.setattr(os, "posix_fallocate", _no_space)
        with pytest.raises(DiskError, match="No space left on device"):
            adamw(model, TASK)
        monkeypatch.undo()
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=before))
        train_step(model, adamw(model, TASK), next(TASK.batches()))
        assert engine.bytes_by_tier()["disk"] > 0


def test_host_memory_that_cannot_be_allocated_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    can_map(torch.device("cpu"))  # its result is kept for the whole process
    monkeypatch.setattr(mmap, "mmap", no_memory)
    with pytest.raises(BudgetError, match=r"the host has no .* lower --host-memory"):
        _offload_to(tmp_path)


def test_kept_gradients_count_against_the_host_budget(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path) as engine:
        adamw(model, TASK)
        exact = engine.bytes_by_tier()["host"] + PROCESS  # records, buffers and the process
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path, host_memory=exact):
        with pytest.raises(BudgetError, match=r"--host-memory .*max_grad_norm=None"):
            adamw(model, CLIPPED)
        train_step(model, adamw(model, TASK), next(TASK.batches()))
