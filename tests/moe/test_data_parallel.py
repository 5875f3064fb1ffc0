"""torch's wrappers for several GPUs and processes: the results of the plain model, or an error."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from overspill.core.errors import OrderError
from tests.moe.oracle import HOME_OR_NOT, Task, adamw, plain_run, spilled, train

TASK = Task(n_layers=2, steps=3)


def replicate(model: nn.Module) -> None:
    """What torch.nn.DataParallel does to each module."""
    for module in model.modules():
        module._replicate_for_data_parallel()


@contextmanager
def processes(count: int, folder: Path) -> Iterator[None]:
    """A group of one process, or of several whose others do nothing."""
    if count == 1:
        url = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_copies_on_several_gpus_are_refused(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, HOME_OR_NOT[1], tmp_path):
        with pytest.raises(OrderError, match=r"DataParallel .* start one process per GPU"):
            replicate(model)
        replicate(model.blocks[0].attention)


def test_data_parallel_without_several_gpus_is_the_model(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, HOME_OR_NOT[1], tmp_path):
        wrapped: Any = nn.DataParallel(model, device_ids=[])
        assert train(wrapped, adamw(model, TASK), TASK).losses == pytest.approx(
            plain_run(TASK).losses, rel=1e-5
        )


@pytest.mark.parametrize("where", HOME_OR_NOT)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_one_process_of_distributed_data_parallel_trains_as_the_plain_model(
    where: str, clip: float | None, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=3, clip=clip)
    model = task.model()
    with processes(1, tmp_path), spilled(model, where, tmp_path):
        wrapped: Any = DistributedDataParallel(model)
        run = train(wrapped, adamw(model, task), task)
    assert run.losses == pytest.approx(plain_run(task).losses, rel=1e-5)


def test_several_processes_that_train_experts_are_refused(tmp_path: Path) -> None:
    model, (tokens,) = TASK.model(), next(TASK.batches())
    with processes(2, tmp_path), spilled(model, HOME_OR_NOT[1], tmp_path):
        wrapped = DistributedDataParallel(model)
        with pytest.raises(OrderError, match=r"2 processes, .* freeze the experts"):
            wrapped(tokens[:, :-1])
        with torch.no_grad():
            assert wrapped(tokens[:, :-1]).logits.isfinite().all()
        for layer in model.moe_layers():
            layer.experts.requires_grad_(False)
        assert wrapped(tokens[:, :-1]).logits.requires_grad


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    model, (tokens,) = TASK.model(), next(TASK.batches())
    with processes(1, tmp_path), spilled(model, HOME_OR_NOT[1], tmp_path, idle=False):
        fully_shard(model)
        with pytest.raises(OrderError, match=r"FSDP .* load the model without it"):
            model(tokens[:, :-1])
