"""Whether the CPU computes some of the experts, and the measurements for that decision."""

import logging
from collections.abc import Sequence

import torch

from overspill.compute.cpu_kernel import cpu_isa, why_unsupported
from overspill.core.errors import BudgetError, ConfigError
from overspill.hardware.machine import cpu_threads
from overspill.hardware.profile import ExpertCosts
from overspill.models.expert_layers import ExpertLayer
from overspill.models.progress_bar import TerminalProgress
from overspill.moe.settings import Settings
from overspill.probe.known import known_costs
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress
from overspill.transfer.mapped import can_map

_log = logging.getLogger("overspill")


def check_cpu_experts(layers: Sequence[ExpertLayer], settings: Settings) -> None:
    """Raises if the CPU can compute the experts of no layer, whatever the machine has."""
    if not settings.cpu_experts or cpu_isa() is None:
        return
    reasons = [why_unsupported(own.dtype, own.shape, own.activation()) for own in layers]
    if None not in reasons:
        raise ConfigError(
            f"the CPU does not compute these experts: {reasons[0]}; leave out cpu_experts "
            "(--cpu-experts)"
        )


def why_no_cpu_experts(
    layout: RecordLayout, device: torch.device, settings: Settings
) -> str | None:
    """Return why the CPU computes no experts, or None if it does."""
    if not settings.cpu_experts:
        return "cpu_experts is off"
    if device.type != "cuda":
        return "there is no GPU"
    if layout.format is not None:
        return "the CPU kernel for prompts does not read packed experts"
    if any(layout.ranks):
        return "the experts have an adapter beside their weights"
    unsupported = why_unsupported(layout.dtype, layout.shape, None)
    if unsupported is not None:
        return f"the CPU kernel does not support {unsupported}"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are required, and the split depends on timing"
    if not can_map(device):
        return f"kernels on {device} cannot access host memory"
    return None


def cpu_expert_costs(
    layout: RecordLayout, device: torch.device, settings: Settings, progress: Progress | None
) -> ExpertCosts | None:
    """Return the measured costs of an expert on this machine, or None if the CPU computes no
    experts."""
    why = why_no_cpu_experts(layout, device, settings)
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
