"""Whether the CPU gets a share of a model's experts, and what is measured and kept for it."""

import logging

import torch

from overspill.core.errors import BudgetError
from overspill.hardware.machine import cpu_threads
from overspill.hardware.profile import ExpertCosts
from overspill.models.progress_bar import TerminalProgress
from overspill.moe.settings import Settings
from overspill.probe.known import known_costs
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress
from overspill.transfer.mapped import can_map

_log = logging.getLogger("overspill")


def why_unshared(layout: RecordLayout, device: torch.device, settings: Settings) -> str | None:
    """Why the CPU has no share in the experts, if so."""
    if not settings.cpu_experts:
        return "cpu_experts is off"
    if device.type != "cuda":
        return "there is no GPU to share them with"
    if layout.dtype not in (torch.bfloat16, torch.float32):
        return f"the CPU has no kernel for {layout.dtype}"
    if settings.activations == "keep":
        return 'with activations="keep" the CPU has no share'
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are wanted, and who computes what goes by the clock"
    if not can_map(device):
        return f"kernels of {device} cannot be given host memory"
    return None


def share_costs(
    layout: RecordLayout, device: torch.device, settings: Settings, progress: Progress | None
) -> ExpertCosts | None:
    """What an expert costs on this machine, if its CPU is to share them with a GPU."""
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
        _log.warning(
            "all experts compute on %s: there was no memory free to measure one for the CPU", device
        )
        return None
