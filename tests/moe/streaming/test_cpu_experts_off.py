"""Where the CPU gets no experts: the device computes all of them, with the same results."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from overspill.compute.activation import Differentiated
from overspill.compute.cpu_kernel import cpu_isa
from overspill.core.errors import ConfigError
from overspill.moe.autograd import routed_experts
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.moe.settings import Settings
from tests.moe.oracle import N_EXPERTS
from tests.moe.streaming.frozen import (
    HOST,
    Results,
    SmallTask,
    compute,
    cpu_jobs,
    cpu_settings,
    plain,
    traced,
)
from tests.moe.streaming.policies import all_on_cpu

pytestmark = pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler")


def assert_cpu_is_off(task: SmallTask, where: str, disk: Path, settings: Settings) -> None:
    with traced(task, where, disk, settings) as (model, engine):
        for _ in range(2):
            compute(model, task.tokens).assert_close(plain(task))
        assert not cpu_jobs(engine)


def test_kept_activations_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"not supported with cpu_experts.*\(--activations\), or"):
        Settings(cpu_experts=True, activations="keep")


def test_deterministic_algorithms_turn_cpu_experts_off(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert_cpu_is_off(SmallTask(), HOST[1], tmp_path, cpu_settings(all_on_cpu))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_setting_turns_cpu_experts_off_and_on_between_passes(tmp_path: Path) -> None:
    task, on = SmallTask(), cpu_settings(all_on_cpu, threads=1)
    off = Settings(cpu_policy=all_on_cpu, threads=1)
    with traced(task, HOST[1], tmp_path, off) as (model, engine):
        compute(model, task.tokens).assert_close(plain(task))
        assert not cpu_jobs(engine)
        engine.switch(on)
        compute(model, task.tokens).assert_close(plain(task))
        assert cpu_jobs(engine)


def test_a_switch_between_forward_and_backward_keeps_the_results(tmp_path: Path) -> None:
    task, on = SmallTask(), cpu_settings(all_on_cpu, threads=1)
    with traced(task, HOST[1], tmp_path, on) as (model, engine):
        logits = model(task.tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), task.tokens[:, 1:].flatten())
        engine.switch(Settings(cpu_policy=all_on_cpu, threads=1))
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        Results(logits.detach(), gradients).assert_close(plain(task))
        assert not any(job.startswith("backward") for job in cpu_jobs(engine))


def test_experts_on_disk_turn_cpu_experts_off_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_cpu_is_off(SmallTask(), "disk behind 3 host slots", tmp_path, cpu_settings(all_on_cpu))
    assert "cpu_experts is off: experts on disk" in caplog.text


def test_another_activation_turns_cpu_experts_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = SmallTask(gated=False)
    x, ids = torch.randn(8, task.config.d_model), torch.arange(8).view(8, 1) % N_EXPERTS
    expected = task.model().moe_layers()[0]
    with torch.no_grad():
        pairs = zip(x, expected.w_in[ids[:, 0]], expected.w_out[ids[:, 0]], strict=True)
        y = torch.stack([w_out @ torch.tanh(w_in @ row) for row, w_in, w_out in pairs])
    with traced(task, HOST[1], tmp_path, cpu_settings(all_on_cpu)) as (_, engine):
        placeholder = ExpertPlaceholder(engine, 0, activation=Differentiated(torch.tanh))
        with torch.no_grad():
            for _ in range(2):
                got = routed_experts(placeholder, x, ids, torch.ones(8, 1))
                torch.testing.assert_close(got, y)
        assert not cpu_jobs(engine)
    assert caplog.text.count("cpu_experts is off for layer 0: the activation tanh, ") == 1
