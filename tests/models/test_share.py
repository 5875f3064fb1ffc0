"""Whether the CPU gets a share of a model's experts when it is offloaded."""

import pytest
import torch

import overspill
from overspill import Settings
from overspill.core.errors import BudgetError
from overspill.core.experts import ExpertShape
from overspill.hardware.profile import ExpertCosts
from overspill.models import GPTMoE, get_preset, share
from overspill.tiers.layout import RecordLayout
from overspill.transfer.mapped import can_map

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = ExpertShape(16, 32, gated=False)
LAYOUT = RecordLayout(SHAPE, torch.bfloat16)
TINY = get_preset("nano")


def why_not(
    settings: Settings, layout: RecordLayout = LAYOUT, device: torch.device = CUDA
) -> str | None:
    reason = share.why_unshared(layout, device, settings)
    assert reason is None or isinstance(reason, str)
    return reason


def test_there_are_reasons_not_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "can_map", lambda device: True)
    assert why_not(Settings()) is None
    assert why_not(Settings(cpu_experts=False)) == "cpu_experts is off"
    assert "no GPU" in str(why_not(Settings(), device=CPU))
    assert "torch.float16" in str(why_not(Settings(), RecordLayout(SHAPE, torch.float16)))
    assert "keep" in str(why_not(Settings(activations="keep")))
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in str(why_not(Settings()))
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(share, "can_map", lambda device: False)
    assert "host memory" in str(why_not(Settings()))


def test_without_room_to_measure_there_is_no_share(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> ExpertCosts:
        raise BudgetError("the host has no 2.0 GiB for experts")

    monkeypatch.setattr(share, "can_map", lambda device: True)
    monkeypatch.setattr(share, "known_costs", no_room)
    assert share.share_costs(LAYOUT, CUDA, Settings(), None) is None
    assert "no memory free to measure one for the CPU" in caplog.text


@pytest.fixture
def nearly_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, up to the measuring."""
    module = "overspill.models.offload"
    monkeypatch.setattr(f"{module}.why_unshared", lambda *_: None)
    monkeypatch.setattr(f"{module}.share_costs", lambda *_: None)
    monkeypatch.setattr(f"{module}.predictor_bytes", lambda *_: 1 << 40)


@pytest.mark.usefixtures("nearly_shared")
def test_predictors_without_room_are_done_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="overspill")
    model = overspill.offload(GPTMoE(TINY), "1GiB", device="cpu", mode="host", quiet=True)
    assert model.overspill.settings.lookahead == 0
    assert "predictors (1.0 TiB) do not fit: lookahead is off" in caplog.text
    model.overspill.close()


@pytest.mark.usefixtures("nearly_shared")
def test_where_all_experts_fit_no_predictors_are_counted() -> None:
    model = overspill.offload(GPTMoE(TINY), "1GiB", device="cpu", quiet=True)
    assert model.overspill.placement.mode == "gpu"
    model.overspill.close()


def test_a_cpu_sees_host_memory() -> None:
    assert can_map(CPU)


@pytest.mark.gpu
def test_the_first_gpu_sees_host_memory() -> None:
    assert can_map(torch.device("cuda:0"))
