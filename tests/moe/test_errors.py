"""What cannot work says so at once, names the fix, changes nothing and leaves no thread behind."""

import copy
import dataclasses
import errno
import math
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.core.errors import (
    BudgetError,
    ConfigError,
    DiskError,
    EngineError,
    NonFiniteError,
    OrderError,
)
from overspill.models.gpt import GPTMoE
from overspill.moe.engine import Engine
from overspill.moe.settings import Settings
from overspill.moe.streaming.engine import StreamingEngine
from overspill.plan.budget import PROCESS
from overspill.tiers.store import Part
from tests.moe.oracle import (
    Run,
    Task,
    adamw,
    assert_same_bits,
    delays,
    loss_of,
    spilled,
    threads_left,
    train_step,
    weights_of,
)

STREAMED = ["host with 2 slots", "host with 12 slots", "disk behind 3 host slots"]
ONE_OF_EACH = ["gpu", "host with 2 slots", "disk behind 3 host slots"]
TASK = Task(steps=6)
CLIPPED = Task(steps=6, clip=0.5)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not threads_left()
    assert not list(tmp_path.glob("overspill-*")), "spill was left on the disk"


def batches_of(task: Task) -> list[Any]:
    return list(task.batches())


# -- calls in the wrong order -----------------------------------------------------------------


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_a_second_backward_without_step_names_accumulate(where: str, tmp_path: Path) -> None:
    one, two, *rest = batches_of(TASK)
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss_of(model, one[0]).backward()
        with pytest.raises(OrderError, match=r"opt\.accumulate\(\)"):
            loss_of(model, two[0]).backward()
        # step() is the way out
        optimizer.step()
        optimizer.zero_grad()
        losses = [train_step(model, optimizer, batch) for batch in rest]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_the_same_graph_twice_is_a_second_backward_too(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss = loss_of(model, next(TASK.batches())[0])
        loss.backward(retain_graph=True)
        with pytest.raises(OrderError, match="accumulate"):
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("where", STREAMED)
def test_a_forward_before_step_with_clipping_says_so(where: str, tmp_path: Path) -> None:
    one, two, *_ = batches_of(CLIPPED)
    model = CLIPPED.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, CLIPPED)
        loss_of(model, one[0]).backward()
        with pytest.raises(OrderError, match=r"opt\.step\(\)"):
            loss_of(model, two[0])
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss_of(model, two[0]))


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_a_backward_without_optimizer_names_it(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        loss = loss_of(model, next(TASK.batches())[0])
        with pytest.raises(OrderError, match=r"overspill\.AdamW"):
            loss.backward()


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_zero_grad_after_an_update_during_backward_says_so(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss_of(model, next(TASK.batches())[0]).backward()
        with pytest.raises(OrderError, match="max_grad_norm"):
            optimizer.zero_grad()
        optimizer.step()


def _losses_without(task: Task, where: str, disk: Path, skip: int) -> list[float]:
    """The losses of a run that never saw batch `skip`."""
    model = task.model()
    with spilled(model, where, disk):
        optimizer = adamw(model, task)
        batches = [batch for number, batch in enumerate(task.batches()) if number != skip]
        return [train_step(model, optimizer, batch) for batch in batches]


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_zero_grad_with_clipping_drops_the_batch_as_if_it_never_was(
    where: str, tmp_path: Path
) -> None:
    expected = _losses_without(CLIPPED, where, tmp_path, skip=2)
    model, losses = CLIPPED.model(), []
    with spilled(model, where, tmp_path, Settings(inject=delays(seed=4))):
        optimizer = adamw(model, CLIPPED)
        for number, batch in enumerate(CLIPPED.batches()):
            if number == 2:
                loss_of(model, batch[0]).backward()
                optimizer.zero_grad()
            else:
                losses.append(train_step(model, optimizer, batch))
    assert losses == expected


@pytest.mark.parametrize("where", ["gpu", "host with 5 slots", "disk behind 3 host slots"])
def test_zero_grad_drops_what_was_accumulated(where: str, tmp_path: Path) -> None:
    task = Task(steps=5, micro_batches=3)
    expected = _losses_without(task, where, tmp_path, skip=2)
    model, losses = task.model(), []
    slow = Settings(inject=delays(seed=5, longest=0.01, only="optimizer"))
    with spilled(model, where, tmp_path, slow):
        optimizer = adamw(model, task)
        for number, batch in enumerate(task.batches()):
            if number == 2:
                for tokens in batch:
                    with optimizer.accumulate():
                        loss_of(model, tokens).backward()
                optimizer.zero_grad()  # while some of it is still being added up
            else:
                losses.append(train_step(model, optimizer, batch))
    assert losses == expected


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_a_learning_rate_set_between_backward_and_step_is_not_ignored(
    where: str, tmp_path: Path
) -> None:
    model, clipped = TASK.model(), CLIPPED.model()
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, TASK)
        loss_of(model, next(TASK.batches())[0]).backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(OrderError, match="after step"):
            optimizer.step()  # the experts have moved at the old rate
        optimizer.param_groups[0]["lr"] = TASK.lr
        optimizer.step()
    with spilled(clipped, where, tmp_path):
        optimizer = adamw(clipped, CLIPPED)
        before = weights_of(clipped)
        loss_of(clipped, next(TASK.batches())[0]).backward()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()  # with clipping they move here, at the new one
        assert_same_bits(Run(weights=weights_of(clipped)), Run(weights=before))


def test_accumulate_ends_with_its_block_also_on_an_error(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path) as engine:
        optimizer = adamw(model, TASK)
        with pytest.raises(KeyError), optimizer.accumulate():
            raise KeyError
        assert not engine.accumulating


def test_an_offloaded_model_cannot_be_copied(tmp_path: Path) -> None:
    model = TASK.model()
    with (
        spilled(model, "host with 2 slots", tmp_path),
        pytest.raises(OrderError, match="cannot be copied"),
    ):
        copy.deepcopy(model)


@pytest.mark.parametrize("where", STREAMED)
def test_a_forward_after_close_says_so(where: str, tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, where, tmp_path, idle=False) as engine:
        engine.close()
        with pytest.raises(OrderError, match="closed"):
            loss_of(model, next(TASK.batches())[0])


# -- gradients that are not finite --------------------------------------------------------------


@pytest.mark.parametrize("where", ONE_OF_EACH)
def test_nan_with_clipping_updates_nothing_and_the_batch_can_be_skipped(
    where: str, tmp_path: Path
) -> None:
    expected = _losses_without(CLIPPED, where, tmp_path, skip=2)
    model, losses = CLIPPED.model(), []
    with spilled(model, where, tmp_path):
        optimizer = adamw(model, CLIPPED)
        for number, batch in enumerate(CLIPPED.batches()):
            if number == 2:
                before = weights_of(model)
                (loss_of(model, batch[0]) * float("nan")).backward()
                with pytest.raises(NonFiniteError, match="nothing was updated"):
                    optimizer.step()
                assert_same_bits(Run(weights=weights_of(model)), Run(weights=before))
                optimizer.zero_grad()
            else:
                losses.append(train_step(model, optimizer, batch))
    assert losses == expected


@pytest.mark.parametrize("where", ONE_OF_EACH)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_without_clipping_updates_nothing_with_it(
    where: str, value: float, tmp_path: Path
) -> None:
    model = TASK.model()
    # the updates are late: step() must not go by what they have found so far
    slow = Settings(inject=delays(seed=3, longest=0.01, only="optimizer"))
    with spilled(model, where, tmp_path, slow) as engine:
        optimizer = adamw(model, TASK)
        batch, *others = batches_of(TASK)
        train_step(model, optimizer, batch)
        before = weights_of(model)
        loss = loss_of(model, others[0][0]) * value
        with pytest.raises(NonFiniteError, match="NaN or infinite"):
            _backward_and_step(loss, optimizer)
        engine.flush()
        for name, weight in weights_of(model).items():
            if weight.dim() < 3:
                assert torch.equal(weight, before[name]), name
                continue
            for got, was in zip(weight, before[name], strict=True):
                # an expert that got no token of the batch has had its decay
                decayed = was * (1 - TASK.lr * TASK.weight_decay)
                assert torch.equal(got, was) or torch.allclose(got, decayed, rtol=1e-2), name
        # and whoever skips the batch can go on, also where the next uses few of the experts
        optimizer.zero_grad()
        narrow = [torch.full((1, 3), 7)]
        for batch in (narrow, *others):
            assert math.isfinite(train_step(model, optimizer, batch))


def _backward_and_step(loss: Tensor, optimizer: overspill.AdamW) -> None:
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("where", ONE_OF_EACH)
@pytest.mark.parametrize("bad", [0, 1])
def test_nan_in_one_micro_batch_is_told_before_the_dense_weights_move(
    where: str, bad: int, tmp_path: Path
) -> None:
    model = TASK.model()
    slow = Settings(inject=delays(seed=3, longest=0.01, only="optimizer"))
    with spilled(model, where, tmp_path, slow):
        optimizer = adamw(model, TASK)
        tokens = next(TASK.batches())[0]
        before = model.embedding.weight.detach().clone()
        with pytest.raises(NonFiniteError, match="NaN or infinite"):
            _accumulate_with_nan(model, optimizer, tokens, bad)
        assert torch.equal(model.embedding.weight, before)


def _accumulate_with_nan(
    model: GPTMoE, optimizer: overspill.AdamW, tokens: Tensor, bad: int
) -> None:
    for number in range(3):
        with optimizer.accumulate() if number < 2 else nullcontext():
            (loss_of(model, tokens) * (float("nan") if number == bad else 1.0)).backward()
    optimizer.step()


def test_one_expert_with_a_nan_gradient_is_named(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 5 slots", tmp_path):
        optimizer = adamw(model, TASK)
        # the gradient is poisoned on its way into the lowest MoE layer
        model.blocks[0].register_full_backward_pre_hook(
            lambda _, grads: tuple(None if g is None else g * float("nan") for g in grads)
        )
        loss = loss_of(model, next(TASK.batches())[0])
        loss.backward()
        with pytest.raises(NonFiniteError, match="layer 0"):
            optimizer.step()
        optimizer.zero_grad()


# -- failures in the engine's threads ------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("upload", "host with 2 slots"),
        ("upload", "disk behind 3 host slots"),
        ("download", "host with 5 slots"),
        ("optimizer", "host with 12 slots"),
        ("optimizer", "disk behind 9 host slots"),
        ("ssd read", "disk behind 3 host slots"),
        ("ssd write", "disk behind 3 host slots"),
    ],
)
@pytest.mark.parametrize(("clip", "after"), [(None, 25), (0.5, 0)])
def test_a_job_that_fails_is_told_in_the_main_thread(
    kind: str, where: str, clip: float | None, after: int, tmp_path: Path
) -> None:
    seen = 0

    def fail(what: str) -> None:
        nonlocal seen
        if what == kind:
            seen += 1
            if seen > after:
                raise OSError(errno.EIO, "injected")

    task = Task(clip=clip)
    model = task.model()
    with spilled(model, where, tmp_path, Settings(inject=fail), idle=False) as engine:
        optimizer = adamw(model, task)
        began = time.monotonic()
        # a download is issued by the main thread itself
        expected = OSError if kind == "download" else EngineError
        with pytest.raises(expected, match="injected"):
            _train_until_it_fails(model, optimizer, task, engine)
        if kind != "download":
            with pytest.raises(EngineError):
                engine.flush()  # and it stays told
        assert time.monotonic() - began < 10


def _train_until_it_fails(
    model: GPTMoE, optimizer: overspill.AdamW, task: Task, engine: Engine
) -> None:
    for batch in task.batches():
        train_step(model, optimizer, batch)
    engine.flush()


def test_a_disk_file_that_was_cut_is_a_disk_error(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "disk behind 3 host slots", tmp_path, idle=False) as engine:
        optimizer = adamw(model, TASK)
        train_step(model, optimizer, next(TASK.batches()))
        engine.flush()
        os.ftruncate(engine.store.files[Part.WEIGHTS].fd, 0)
        with pytest.raises(DiskError, match=r"weights\.bin.*last checkpoint"):
            _train_until_it_fails(model, optimizer, TASK, engine)


# -- budgets and folders ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"gpu_memory": "4KiB"}, r"--gpu-memory 4\.0 KiB .* give at least"),
        ({"slots": 1}, r"slots=1 .* give 2"),
        ({"mode": "host", "host_memory": "1MiB"}, r"--host-memory 1\.0 MiB .* --disk"),
        ({"mode": "host", "host_memory": "1000TiB"}, r"--host-memory .* is not there.* lower it"),
        ({"mode": "disk"}, r"--disk FOLDER"),
        ({"mode": "disk", "disk": "", "host_memory": "1GiB"}, r"--host-memory .* give at least"),
        ({"mode": "disk", "disk": "", "host_slots": 1}, r"two experts.* give at least"),
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
        ({"mode": "hots"}, "mode='hots' is not one of auto, gpu, host, disk"),
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
    [{"activations": "kep"}, {"resident_share": 1.5}, {"resident_share": -0.1}, {"threads": 0}],
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


def test_a_disk_that_fills_up_while_space_is_taken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _no_space)
    with pytest.raises(DiskError, match=r"no room for .* \(No space left on device\).* --disk"):
        _offload_to(tmp_path)


def test_a_disk_without_room_for_the_states_is_named_by_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TASK.model()
    with spilled(model, "disk behind 3 host slots", tmp_path) as engine:
        before = weights_of(model)
        monkeypatch.setattr(os, "posix_fallocate", _no_space)
        with pytest.raises(DiskError, match="no room for"):
            adamw(model, TASK)
        monkeypatch.undo()
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=before))
        train_step(model, adamw(model, TASK), next(TASK.batches()))
        assert engine.bytes_by_tier()["disk"] > 0


def test_host_memory_that_cannot_be_taken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", no_memory)
    with pytest.raises(BudgetError, match=r"the host has no .* lower --host-memory"):
        _offload_to(tmp_path)


def test_gradients_that_wait_count_against_the_host_budget(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, "host with 2 slots", tmp_path) as engine:
        adamw(model, TASK)
        # the budget holds the records and the process, and nothing more
        exact = dataclasses.replace(
            engine.placement, host_memory=engine.bytes_by_tier()["host"] + PROCESS
        )
        assert isinstance(engine, StreamingEngine)
        engine.gradients.placement = exact
        with pytest.raises(BudgetError, match=r"--host-memory .*max_grad_norm=None"):
            adamw(model, CLIPPED)
