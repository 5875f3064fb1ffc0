"""Whether the CPU computes some of the experts, and what is measured for that decision."""

import logging

import torch

from overspill.core.errors import BudgetError
from overspill.hardware.machine import cpu_threads
from overspill.hardware.profile import ExpertCosts
from overspill.models.progress_bar import TerminalProgress
from overspill.moe.predictor import PREDICTOR_COPIES
from overspill.moe.settings import Settings
from overspill.probe.known import known_costs
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress
from overspill.transfer.mapped import can_map

_log = logging.getLogger("overspill")


def why_unshared(layout: RecordLayout, device: torch.device, settings: Settings) -> str | None:
    """Why the CPU computes no experts, or None if it does."""
    if not settings.cpu_experts:
        return "cpu_experts is off"
    if device.type != "cuda":
        return "there is no GPU"
    if layout.dtype not in (torch.bfloat16, torch.float32):
        return f"the CPU has no kernel for {layout.dtype}"
    if settings.activations == "keep":
        return 'the CPU computes no experts with activations="keep"'
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are required, and the split depends on timing"
    if not can_map(device):
        return f"kernels on {device} cannot access host memory"
    return None


def share_costs(
    layout: RecordLayout, device: torch.device, settings: Settings, progress: Progress | None
) -> ExpertCosts | None:
    """Measured costs of an expert on this machine, or None if the CPU computes no experts."""
    why = why_unshared(layout, device, settings)
    if why is not None:
        _log.info("all experts compute on %s: %s", device, why)
        return None
    if isinstance(progress, TerminalProgress):
        progress = TerminalProgress(counted=True)
    threads = cpu_threads(settings.threads)
    try:
        return known_costs(layout.shape, layout.dtype, device, threads, progress)
    except (BudgetError, torch.OutOfMemoryError):
        _log.warning("all experts compute on %s: no memory free to measure one for the CPU", device)
        return None


def predictor_bytes(n_layers: int, n_experts: int, layout: RecordLayout, settings: Settings) -> int:
    """Memory of the predictors on the compute device."""
    if not settings.lookahead:
        return 0
    return n_layers * PREDICTOR_COPIES * n_experts * layout.shape.d_model * 4
