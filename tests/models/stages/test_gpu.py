"""On a GPU: stages with activations in host memory train as micro-batches one after another."""

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.models.huggingface.families import make_model
from tests.models.huggingface.oracle import ADAM, MODES
from tests.models.stages.staged import MIXTRAL, Batch, micro_batches, train_plain, train_staged
from tests.moe.oracle import Task, adamw, train_step
from tests.parallel import test_stages as ranks
from tests.parallel.processes import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("measured_roughly"),
]
CYCLES = 1_000_000  # of a delay, half a millisecond


def steps(count: int) -> list[list[Batch]]:
    batches = micro_batches(3)
    on_gpu: list[Batch] = [{key: value.cuda() for key, value in b.items()} for b in batches]
    return [on_gpu] * count


def delay(kind: str) -> None:
    """Queues waiting time on the stream that a copy or a transfer uses next."""
    torch.cuda._sleep(CYCLES)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_stages", [2, 4])
def test_stages_follow_plain_transformers(
    n_stages: int, mode: str, delayed: bool, tmp_path: Path
) -> None:
    plain = make_model(MIXTRAL)
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    where: dict[str, Any] = dict(MODES[mode])
    if mode == "disk":
        where["disk"] = tmp_path
    settings = overspill.Settings(inject=delay) if delayed else None
    twin = make_model(MIXTRAL)
    twin.load_state_dict(plain.state_dict())
    twin.gradient_checkpointing_enable({"use_reentrant": False})
    twin = overspill.offload(
        twin, device="cuda", quiet=True, progress=False, settings=settings, **where
    )
    expected = train_plain(plain.cuda(), steps(4), clip=0.5)
    optimizer = overspill.AdamW(twin, max_grad_norm=0.5, **ADAM)
    stages = overspill.Stages(twin, n_stages, offload_activations=True, small_activation=0)
    found = train_staged(stages, twin, optimizer, steps(4))
    for mine, theirs in zip(found.losses, expected.losses, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    assert found.norms == pytest.approx(expected.norms, rel=1e-3)
    twin.overspill.check_conserved()
    twin.overspill.close()


@pytest.mark.parametrize("small", [0, 1 << 16])
def test_a_gpt_with_pre_gates_trains_as_without_stages(small: int) -> None:
    """Blocks are recomputed from inputs that have come back from host memory, or have not left."""
    task = Task(n_layers=4, micro_batches=3, checkpoint=True, clip=0.3, steps=3)
    runs = []
    for n_stages in (None, 3):
        model: Any = task.model()
        given = {"mode": "host", "slots": 5, "quiet": True, "progress": False}
        overspill.offload(model, device="cuda", stages=n_stages, **given)  # type: ignore[arg-type]
        overspill.pregate(model, 2)
        optimizer, losses = adamw(model, task), []
        stages = None
        if n_stages is not None:
            parked = {"offload_activations": True, "small_activation": small}
            stages = overspill.Stages(model, **parked)  # type: ignore[arg-type]
        for batches in task.batches():
            on_gpu = [each.cuda() for each in batches]
            if stages is None:
                losses.append(train_step(model, optimizer, on_gpu))
                continue
            inputs = [{"tokens": each[:, :-1], "targets": each[:, 1:]} for each in on_gpu]
            total: list[float] = []

            def loss_of(_: int, output: Any, total: list[float] = total) -> torch.Tensor:
                loss: torch.Tensor = output.loss / task.micro_batches
                total.append(loss.item())
                return loss

            stages.backward(inputs, optimizer, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(total))
        runs.append(losses)
        model.overspill.check_conserved()
        model.overspill.close()
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)


def test_the_gpu_does_not_hold_the_activations_of_all_micro_batches() -> None:
    peaks = []
    for offload in (True, False):
        model = make_model(MIXTRAL)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = overspill.offload(model, device="cuda", quiet=True, progress=False, mode="gpu")
        optimizer = overspill.AdamW(model, **ADAM)
        stages = overspill.Stages(model, 4, offload_activations=offload, small_activation=0)
        ids = torch.randint(3, 64, (64, 64), device="cuda")
        batches = [{"input_ids": ids, "labels": ids}] * 24
        stages.backward(batches, optimizer)  # warms up
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        stages.backward(batches, optimizer)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        optimizer.step()
        model.overspill.close()
    hidden = 64 * 64 * 32 * 4
    assert peaks[1] - peaks[0] > 24 * 2 * hidden  # of three stages of 24 micro-batches


def test_two_ranks_that_share_a_gpu_divide_stages(tmp_path: Path) -> None:
    cases = {name: case for name, case in ranks.TWO.items() if "disk" not in name}
    found = run_ranks(2, ranks.work, cases, tmp_path, "cuda", method="spawn", timeout=120.0)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    for name, case in cases.items():
        losses, _ = ranks.plain(case)
        for result in found:
            assert result[name]["losses"] == pytest.approx(losses, rel=1e-3), name
