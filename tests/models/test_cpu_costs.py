"""Whether the CPU computes experts of a model when it is offloaded."""

import pytest
import torch

import overspill
from overspill import Settings
from overspill.compute.cpu_kernel import cpu_isa
from overspill.core.errors import BudgetError, ConfigError
from overspill.core.experts import ExpertShape
from overspill.hardware.profile import ExpertCosts
from overspill.models import GPTMoE, cpu_costs, get_preset
from overspill.tiers.layout import RecordLayout

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = ExpertShape(16, 32, gated=False)
LAYOUT = RecordLayout(SHAPE, torch.bfloat16)
ON = Settings(cpu_experts=True)


def why_not(
    settings: Settings, layout: RecordLayout = LAYOUT, device: torch.device = CUDA
) -> str | None:
    reason = cpu_costs.why_no_cpu_experts(layout, device, settings)
    assert reason is None or isinstance(reason, str)
    return reason


def test_there_are_reasons_for_no_cpu_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_costs, "can_map", lambda device: True)
    assert why_not(ON) is None
    assert why_not(Settings()) == "cpu_experts is off"
    assert "no GPU" in str(why_not(ON, device=CPU))
    assert "torch.float16" in str(why_not(ON, RecordLayout(SHAPE, torch.float16)))
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in str(why_not(ON))
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(cpu_costs, "can_map", lambda device: False)
    assert "host memory" in str(why_not(ON))


def test_without_memory_to_measure_there_are_no_cpu_experts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> ExpertCosts:
        raise BudgetError("the host has no 2.0 GiB for experts")

    monkeypatch.setattr(cpu_costs, "can_map", lambda device: True)
    monkeypatch.setattr(cpu_costs, "known_costs", no_room)
    assert cpu_costs.cpu_expert_costs(LAYOUT, CUDA, ON, None) is None
    assert "no memory free to measure one for the CPU" in caplog.text


@pytest.mark.skipif(cpu_isa() is None, reason="no C++ compiler")
def test_experts_that_the_cpu_never_computes_are_refused_before_anything_is_allocated() -> None:
    model = GPTMoE(get_preset("nano"), dtype=torch.float16, seed=1).eval()
    with pytest.raises(ConfigError, match=r"does not compute these experts: torch.float16; leave"):
        overspill.offload(model, device="cpu", mode="host", slots=4, quiet=True, settings=ON)
    assert not hasattr(model, "overspill")
