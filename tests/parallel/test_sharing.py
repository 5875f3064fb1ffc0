"""Ranks that compute experts of each other: what can go wrong, and what is left."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import overspill
from overspill.core.errors import BudgetError, ConfigError, NonFiniteError, RankError
from overspill.moe.settings import Settings
from tests.moe.oracle import Task, loss_of
from tests.parallel.processes import run_ranks
from tests.parallel.training import offload

TASK = Task(n_layers=2)
TOKENS = torch.arange(48).view(4, 12)
DYNAMIC = Settings(placement="dynamic", threads=1)


def own_tokens(mesh: DeviceMesh) -> Tensor:
    return TOKENS[mesh.get_local_rank() :: 2]


def together(mesh: DeviceMesh, attempts: list[Callable[[DeviceMesh], Any]]) -> list[Any]:
    """The results of all, or what they raise: one start of processes serves them all."""
    found: list[Any] = []
    for attempt in attempts:
        try:
            found.append(attempt(mesh))
        except Exception as error:
            found.append(error)
    return found


def refused_memory(mesh: DeviceMesh) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    model = TASK.model()
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_local_rank() == 1:
            patch.setattr(os, "memfd_create", refuse)
        try:
            offload(model, mesh, settings=DYNAMIC)
        finally:
            loss_of(model, own_tokens(mesh)).backward()  # it is the plain model


def on_the_device(mesh: DeviceMesh) -> None:
    offload(TASK.model(), mesh, settings=DYNAMIC, mode="gpu")


def residents(mesh: DeviceMesh) -> None:
    model: Any = TASK.model()
    offload(model, mesh, settings=DYNAMIC)
    model.overspill.set_residents([1, 1])


def nothing_left(mesh: DeviceMesh) -> list[str]:
    """Names that would remain if this process were killed now, and files that children inherit."""
    model: Any = TASK.model()
    before, had = mappings(), open_files() | shared_names()
    offload(model, mesh, settings=DYNAMIC)
    assert mappings() == before + 2  # of both ranks
    left = (open_files() | shared_names()) - had  # a log that the tests are written to is not ours
    model.overspill.close()
    assert mappings() == before
    return sorted(left)


def open_files() -> set[str]:
    """The files and sockets that this process has open, with their numbers."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def shared_names() -> set[str]:
    """Names of shared memory on this machine that Overspill has given."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("overspill")}


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:overspill")


def not_finite(mesh: DeviceMesh, clip: float | None) -> list[Any]:
    """What a step with an infinite loss on one rank raises, and the losses around it."""
    model = TASK.model()
    offload(model, mesh, settings=DYNAMIC)
    optimizer = overspill.AdamW(model, lr=1e-3, max_grad_norm=clip)
    found: list[Any] = []
    for factor in (1.0, float("nan") if mesh.get_local_rank() == 1 else 1.0):
        loss = loss_of(model, own_tokens(mesh))
        (factor * loss).backward()
        try:
            optimizer.step()
        except Exception as error:
            found.append(error)
        optimizer.zero_grad()
    return found


def clipped(mesh: DeviceMesh) -> list[Any]:
    return not_finite(mesh, 1.0)


def unclipped(mesh: DeviceMesh) -> list[Any]:
    return not_finite(mesh, None)


def loaded_weights(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Logits after owners have written new weights between two passes; and of a plain model."""
    model, other = TASK.model(), TASK.model()
    with torch.no_grad():
        for parameter in (p for moe in other.moe_layers() for p in moe.expert_parameters()):
            parameter.mul_(2)
    want = other(own_tokens(mesh)).logits
    offload(model, mesh, settings=DYNAMIC)
    engine: Any = model.overspill
    with torch.no_grad():
        model(own_tokens(mesh))  # ranks have copies of the old weights
    for expert in engine.records.ids():
        engine.records.write_weights(expert, lambda weights: weights.mul_(2))
    got = model(own_tokens(mesh)).logits
    assert engine.balance.placed < engine.balance.static
    return got.detach(), want.detach()


def frozen(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The gradient of the embedding where experts are frozen; and that of the plain model."""
    model = TASK.model()
    for moe in model.moe_layers():
        for parameter in moe.expert_parameters():
            parameter.requires_grad_(False)
    loss_of(model, own_tokens(mesh)).backward()
    want = model.embedding.weight.grad
    model.zero_grad()
    offload(model, mesh, settings=DYNAMIC)
    loss_of(model, own_tokens(mesh)).backward()
    got = model.embedding.weight.grad
    assert want is not None
    assert got is not None
    return got, want


ATTEMPTS: list[Callable[[DeviceMesh], Any]] = [
    refused_memory,
    on_the_device,
    residents,
    nothing_left,
    loaded_weights,
    frozen,
    clipped,
    unclipped,
]


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Any, Any]]:
    zero, one = run_ranks(2, together, ATTEMPTS)
    pairs = zip(zero, one, strict=True)
    return {attempt.__name__: pair for attempt, pair in zip(ATTEMPTS, pairs, strict=True)}


def test_ranks_fail_together_and_leave_nothing(results: dict[str, tuple[Any, Any]]) -> None:
    other, own = results["refused_memory"]
    assert isinstance(own, BudgetError)
    assert isinstance(other, RankError)
    assert "failed on rank 1: BudgetError" in str(other)
    assert "memfd): [Errno 1] Operation not permitted; lower --host-memory, or use " in str(other)
    for error in results["on_the_device"]:
        assert isinstance(error, ConfigError)
        assert "on rank 0 experts live on the GPU or on disk" in str(error)
    for error in results["residents"]:
        assert isinstance(error, ConfigError)
    assert results["nothing_left"] == ([], [])
    for name in ("loaded_weights", "frozen"):
        for got, want in results[name]:
            torch.testing.assert_close(got, want)


def test_a_gradient_that_is_not_finite_ends_the_step_on_all_ranks(
    results: dict[str, tuple[Any, Any]],
) -> None:
    for with_clipping, without in zip(results["clipped"], results["unclipped"], strict=True):
        assert [type(error) for error in with_clipping] == [NonFiniteError]
        (error,) = without
        assert isinstance(error, NonFiniteError | RankError)
