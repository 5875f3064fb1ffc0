"""Passes with token rows in groups of experts: ranks without rows, experts that move, uploads, the
order of work, and errors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import overspill
from overspill.core.errors import ConfigError
from overspill.core.expert_map import ExpertMap
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from overspill.moe.state_dict import split_record
from overspill.plan.usage import Swap
from tests.moe.oracle import Task, loss_of
from tests.moe.pipeline import cases as layers
from tests.parallel.processes import run_ranks
from tests.parallel.training import Case, Result, assert_follows, offload, plain, train_rank

TASK = Task(n_layers=2, lr=1e-3, steps=3)  # five experts: ranks have three and two of them


def settings(groups: int, rows: str = "send", **options: Any) -> Settings:
    return Settings(exchange_groups=groups, received_rows=rows, **options)


# -- ranks without tokens, or without token rows to compute -------------------------------------

LAYER = layers.Case(1, "none", ("silu", True), 2, "even", "collective")
LOADS = [replace(LAYER, load=load) for load in ("empty rank", "two experts", "few tokens")]


def gradients_of_layer(mesh: DeviceMesh, case: layers.Case, rows: str) -> layers.Result:
    """Those of experts from their first moments."""
    rank, layer = mesh.get_local_rank(), case.layer(mesh=mesh)
    model = nn.ModuleList([layer])
    overspill.offload(
        model, mesh=mesh, mode="host", slots=2, quiet=True, settings=settings(3, rows, threads=1)
    )
    optimizer = overspill.AdamW(model, lr=1e-3, betas=(0.5, 0.5))
    x, engine = case.x(rank), layer.engine
    y, balance = layer(x)
    layers.loss_of(case, y, balance, rank).backward()
    assert x.grad is not None
    assert layer.router.weight.grad is not None
    drouter = layer.router.weight.grad.clone()
    optimizer.step()
    assert engine is not None
    engine.flush()  # updates may still run
    moments = torch.empty(len(layer.expert_map.local_ids), engine.shape.numel)
    for moment, expert in zip(moments, engine.records.ids(), strict=True):
        engine.records.read_state(expert, "exp_avg", moment)
    pairs = [split_record(2 * moment, engine.shape) for moment in moments]
    dw_in, dw_out = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    engine.close()
    return layers.Result(y.detach(), balance.detach(), x.grad, drouter, dw_in, dw_out)


# -- experts that move, uploads and errors -----------------------------------------------------


def train_moving(mesh: DeviceMesh) -> Result:
    def move(engine: Any, step: int) -> None:
        if mesh.get_local_rank() == 0:
            engine.set_residents([step % 3, (step + 1) % 3])

    return train_rank(mesh, MOVING, before_step=move)


MOVING = Case(replace(TASK, clip=0.5), settings=settings(3))


def frozen_model() -> GPTMoE:
    model = TASK.model()
    for moe in model.moe_layers():
        for parameter in moe.expert_parameters():
            parameter.requires_grad_(False)
    return model


def gradients_after_an_exchange(mesh: DeviceMesh, offloaded: bool) -> list[Tensor]:
    """Of the dense part. Two experts of rank 0 exchange places after the first forward, and back
    after the second, which has found them there."""
    model, rank = frozen_model(), mesh.get_local_rank()
    engine: Any = None
    if offloaded:
        offload(model, mesh, gpu_experts=2, settings=settings(3, threads=1))
        overspill.AdamW(model)
        engine = model.overspill
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model, torch.arange(24).view(2, 12) + rank)
        if offloaded and rank == 0:
            engine.swap_experts([Swap(layer, 0, 2) for layer in range(2)])
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def uploads(mesh: DeviceMesh) -> tuple[list[int], int]:
    """Bytes that each number of groups uploads in two steps with frozen experts, and those of all
    experts in all passes."""
    model = frozen_model()
    offload(model, mesh, settings=settings(1, threads=1))
    optimizer, found = overspill.AdamW(model), []
    engine: Any = model.overspill
    for groups in (1, 1, 2, 3):  # the first time fills the slots
        engine.switch(replace(engine.settings, exchange_groups=groups))
        before = engine.recorder.counters().get("upload", 0)
        for _ in range(2):
            loss_of(model, torch.arange(24).view(2, 12)).backward()
            optimizer.zero_grad()
        engine.flush()
        found.append(engine.recorder.counters()["upload"] - before)
    return found[1:], 2 * 2 * len([*engine.records.ids()]) * engine.layout.weight_bytes


def order_of_work(mesh: DeviceMesh) -> list[str]:
    """Exchanges and waves of a forward, as they begin."""
    model = TASK.model()
    offload(model, mesh, settings=settings(3, threads=1))
    engine: Any = model.overspill
    engine.recorder.start()
    with torch.no_grad():
        loss_of(model, torch.arange(24).view(2, 12))
    engine.recorder.stop()
    rows = ("exchange", "compute")
    spans = sorted(engine.recorder.spans(), key=lambda span: span.start_ns)
    return [span.name for span in spans if span.row in rows and span.name != "dense"]


def refusals(mesh: DeviceMesh) -> list[str]:
    found = []
    for groups in (4, 1 + mesh.get_local_rank()):
        try:
            offload(TASK.model(), mesh, settings=settings(groups, threads=1))
        except ConfigError as error:
            found.append(str(error))
    return found


def on_two_ranks(mesh: DeviceMesh) -> dict[str, Any]:
    return {
        "layers": [
            gradients_of_layer(mesh, case, rows) for case in LOADS for rows in ("send", "keep")
        ],
        "moving": train_moving(mesh),
        "exchanged": [gradients_after_an_exchange(mesh, offloaded) for offloaded in (True, False)],
        "uploads": uploads(mesh),
        "order": order_of_work(mesh),
        "refusals": refusals(mesh),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    found = run_ranks(2, on_two_ranks)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def test_ranks_without_rows_have_the_gradients_of_plain_autograd(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank, found in enumerate(two_ranks):
        held = [*ExpertMap.part(layers.N_EXPERTS, rank, 2).local_ids]
        for case, pair in zip(LOADS, zip(*[iter(found["layers"])] * 2, strict=True), strict=True):
            want = layers.naive(case, 2)[rank]
            want = want._replace(dw_in=want.dw_in[held], dw_out=want.dw_out[held])
            for got in pair:
                for mine, theirs in zip(got, want, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_residents_that_change_on_one_rank_do_not_change_training(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert_follows([found["moving"] for found in two_ranks], plain(MOVING))


def test_experts_of_a_rank_exchange_places_between_forward_and_backward(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        for got, want in zip(*found["exchanged"], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_groups_upload_no_expert_twice(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        sizes, most = found["uploads"]
        assert 0 < sizes[0] <= most
        assert sizes == sizes[:1] * 3


def test_rows_of_the_next_group_leave_before_a_group_computes(
    two_ranks: list[dict[str, Any]],
) -> None:
    """And compute waits for the rows of its own group alone."""
    work = two_ranks[0]["order"]  # three experts, each of them a group and a wave
    layer = ["S0", "S1", "C0", "R0", "S2", "C1", "R1", "C2", "R2"]
    want = [name.replace("C", f"forward {n}.") for n in range(2) for name in layer]
    assert [name.split("-")[0] for name in work] == want


def test_impossible_groups_are_refused_by_name_on_all_ranks(
    two_ranks: list[dict[str, Any]],
) -> None:
    for found in two_ranks:
        too_many, different = found["refusals"]
        assert "exchange_groups=4 exceeds the 3 experts of a layer that a rank holds" in too_many
        assert "Settings.exchange_groups must be the same on all ranks" in different
