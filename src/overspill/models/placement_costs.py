"""Measured costs and gains of dynamic placement on this machine."""

import torch

from overspill.compute.experts import wave_backward, wave_forward
from overspill.plan.placement import PlacementCosts
from overspill.probe.clock import seconds_of
from overspill.tiers.layout import RecordLayout

BALANCE_ROWS = PlacementCosts(upload=0.0, row=1.0)
"""Costs with which token rows are always balanced."""
_ROWS = 2048  # token rows that are timed
_SECONDS = 0.05  # limit of each measurement


def measured_costs(layout: RecordLayout, device: torch.device, rows: int = _ROWS) -> PlacementCosts:
    """Measure one expert: an upload in each pass, forward and backward of its token rows. The first
    upload waits for the routing."""
    pinned = device.type == "cuda"
    source = torch.zeros(layout.weight_bytes, dtype=torch.uint8, pin_memory=pinned)
    record = torch.zeros(layout.weight_bytes, dtype=torch.uint8, device=device)
    weights = layout.weights(record)[None]
    x_RD = torch.zeros(rows, layout.shape.d_model, dtype=layout.dtype, device=device)
    weight_R = torch.ones(rows, device=device)
    ends = torch.tensor([rows], dtype=torch.int32, device=device)

    def upload() -> None:
        record.copy_(source, non_blocking=True)
        _wait(device)

    def compute() -> None:
        wave_forward(x_RD, weights, layout.shape, ends, [rows])
        wave_backward(x_RD, x_RD, weight_R, weights, layout.shape, ends, [rows])
        _wait(device)

    seconds = seconds_of(upload, _SECONDS)
    row = seconds_of(compute, _SECONDS) / rows
    return PlacementCosts(upload=2 * seconds, row=row, wait=seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
