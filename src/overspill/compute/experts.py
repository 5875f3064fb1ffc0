"""The feed-forward of one wave: neighbouring experts whose records lie in neighbouring slots.

Shapes: R rows (sorted by expert), D model, H hidden, n experts of the wave. `weights` is [n, numel]
with one record a row; the stride between records is free. `ends` (int32, on the device) are the
cumulative row counts inside the wave, `counts` the same on the host, not cumulated.

A wave may hold a part of an expert's rows only: run it once for each part and add the dw.

Two ways through: `grouped_mm`, one kernel for the wave, where the GPU has it; else a loop over the
experts. The loop does everything expert by expert, the activation too, so an expert's results are
the same bits in whatever wave it runs.
"""

import functools
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute.activation import activate, activate_backward
from overspill.core.experts import ExpertShape

_log = logging.getLogger(__name__)

# The kernel behind grouped_mm has one thread a group in its set-up block.
_MAX_GROUPS = 1024


@dataclass(frozen=True)
class WaveGrads:
    dx_RD: Tensor
    dw_in: Tensor | None
    """[n, H or 2H, D]; None when not asked for."""
    dw_out: Tensor | None
    """[n, D, H]; None when not asked for."""
    drow_weight_R: Tensor

    @property
    def dw(self) -> tuple[Tensor, Tensor]:
        """Both weight gradients, where they were asked for."""
        assert self.dw_in is not None
        assert self.dw_out is not None
        return self.dw_in, self.dw_out


def split_records(weights: Tensor, shape: ExpertShape) -> tuple[Tensor, Tensor]:
    """Views of w_in [n, H or 2H, D] and w_out [n, D, H] in the records [n, numel]."""
    w_in = weights[:, : shape.in_numel].unflatten(1, (shape.in_rows, shape.d_model))
    w_out = weights[:, shape.in_numel : shape.numel].unflatten(1, (shape.d_model, shape.d_hidden))
    return w_in, w_out


@torch.no_grad()
def wave_forward(
    x_RD: Tensor,
    weights: Tensor,
    shape: ExpertShape,
    ends: Tensor,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [R, D], hidden [R, H or 2H]); hidden, the pre-activation, is what backward can reuse.

    Routing weights are not applied. Without `counts` the loop has to wait for the device.
    """
    w_in, w_out = split_records(weights, shape)
    if _grouped(x_RD, weights, shape):
        hidden = F.grouped_mm(x_RD, w_in.transpose(1, 2), offs=ends)
        a_RH = activate(hidden, shape.gated)
        return F.grouped_mm(a_RH, w_out.transpose(1, 2), offs=ends), hidden
    y_RD = torch.empty_like(x_RD)
    hidden = x_RD.new_empty(x_RD.shape[0], shape.in_rows)
    for expert, rows in _expert_rows(ends, counts):
        torch.mm(x_RD[rows], w_in[expert].t(), out=hidden[rows])
        a_RH = activate(hidden[rows], shape.gated)
        torch.mm(a_RH, w_out[expert].t(), out=y_RD[rows])
    return y_RD, hidden


@torch.no_grad()
def wave_backward(
    x_RD: Tensor,
    dy_RD: Tensor,
    row_weight_R: Tensor,
    weights: Tensor,
    shape: ExpertShape,
    ends: Tensor,
    counts: Sequence[int] | None = None,
    hidden: Tensor | None = None,
    need_dw: bool = True,
) -> WaveGrads:
    """Gradients of sum(row_weight * y * dy): `dy_RD` is the gradient of each row's *weighted* y.

    `hidden` is recomputed when it is None. y itself is never recomputed: the gradient of a routing
    weight, y·dy, equals a·(dy @ w_out), and dy @ w_out is needed anyway. The weight then multiplies
    the activation and its gradient, so there is no scaled copy of dy.
    """
    if _grouped(x_RD, weights, shape):
        return _backward_grouped(
            x_RD, dy_RD, row_weight_R, weights, shape, ends, counts, hidden, need_dw
        )
    return _backward_loop(x_RD, dy_RD, row_weight_R, weights, shape, ends, counts, hidden, need_dw)


def _backward_grouped(
    x_RD: Tensor,
    dy_RD: Tensor,
    row_weight_R: Tensor,
    weights: Tensor,
    shape: ExpertShape,
    ends: Tensor,
    counts: Sequence[int] | None,
    hidden: Tensor | None,
    need_dw: bool,
) -> WaveGrads:
    w_in, w_out = split_records(weights, shape)
    recomputed = hidden is None
    if hidden is None:
        hidden = F.grouped_mm(x_RD, w_in.transpose(1, 2), offs=ends)
    da_RH = F.grouped_mm(dy_RD, w_out, offs=ends)
    # A kept hidden may belong to a graph that is run backward again: only our own is overwritten.
    act = activate_backward(hidden, da_RH, row_weight_R, shape.gated, overwrite_h=recomputed)
    del da_RH, hidden
    dw_in: Tensor | None = None
    dw_out: Tensor | None = None
    if need_dw:
        dw_out = F.grouped_mm(dy_RD.t(), act.weighted_RH, offs=ends)
        dw_in = F.grouped_mm(act.dh.t(), x_RD, offs=ends)
        _zero_empty(dw_in, ends, counts)
        _zero_empty(dw_out, ends, counts)
    dx_RD = F.grouped_mm(act.dh, w_in, offs=ends)
    return WaveGrads(dx_RD, dw_in, dw_out, act.drow_weight_R)


def _backward_loop(
    x_RD: Tensor,
    dy_RD: Tensor,
    row_weight_R: Tensor,
    weights: Tensor,
    shape: ExpertShape,
    ends: Tensor,
    counts: Sequence[int] | None,
    hidden: Tensor | None,
    need_dw: bool,
) -> WaveGrads:
    w_in, w_out = split_records(weights, shape)
    dx_RD = torch.empty_like(x_RD)
    wide = torch.promote_types(x_RD.dtype, torch.float32)
    drow_weight_R = x_RD.new_empty(x_RD.shape[0], dtype=wide)
    dw_in = x_RD.new_empty(w_in.shape) if need_dw else None
    dw_out = x_RD.new_empty(w_out.shape) if need_dw else None
    for expert, rows in _expert_rows(ends, counts):
        x, dy = x_RD[rows], dy_RD[rows]
        h = torch.mm(x, w_in[expert].t()) if hidden is None else hidden[rows]
        da = torch.mm(dy, w_out[expert])
        act = activate_backward(h, da, row_weight_R[rows], shape.gated, overwrite_h=hidden is None)
        drow_weight_R[rows] = act.drow_weight_R
        if dw_in is not None and dw_out is not None:
            torch.mm(dy.t(), act.weighted_RH, out=dw_out[expert])
            torch.mm(act.dh.t(), x, out=dw_in[expert])
        torch.mm(act.dh, w_in[expert], out=dx_RD[rows])
    return WaveGrads(dx_RD, dw_in, dw_out, drow_weight_R)


def _expert_rows(ends: Tensor, counts: Sequence[int] | None) -> list[tuple[int, slice]]:
    """(expert, its rows) of the wave, empty experts too: their dw must become zero."""
    stops = ends.tolist() if counts is None else list(itertools.accumulate(counts))
    return [
        (expert, slice(start, stop))
        for expert, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True))
    ]


def _zero_empty(dw: Tensor, ends: Tensor, counts: Sequence[int] | None) -> None:
    """Zeroes the gradients of experts without rows.

    grouped_mm promises nothing there: on Hopper it writes zeros, on Blackwell it leaves garbage
    (pytorch#172439).
    """
    if counts is None:
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        dw.masked_fill_(empty[:, None, None], 0)
        return
    for expert, count in enumerate(counts):
        if count == 0:
            dw[expert].zero_()


def _grouped(x_RD: Tensor, weights: Tensor, shape: ExpertShape) -> bool:
    """Whether one grouped_mm kernel can do this wave."""
    if not x_RD.is_cuda or x_RD.shape[0] == 0:
        return False
    # The kernel loads 16 bytes at once: rows of matrices and records must begin on such a border.
    aligned = (
        shape.d_model % 8 == 0
        and shape.d_hidden % 8 == 0
        and weights.stride(0) % 8 == 0
        and weights.data_ptr() % 16 == 0
    )
    ok = x_RD.dtype is torch.bfloat16 and _has_kernel(x_RD.device) and aligned
    if not ok:
        _say_loop(x_RD.dtype, aligned)
    return ok and weights.shape[0] < _MAX_GROUPS


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    # Elsewhere grouped_mm is itself a loop over groups that first copies the ends to the host; ours
    # is the same loop without that wait.
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def _say_loop(dtype: torch.dtype, aligned: bool) -> None:
    why = f"{dtype}" if aligned else "sizes that are not multiples of 8"
    _log.warning(
        "grouped_mm: not for %s on this GPU, experts of a wave run one by one (slower); "
        "use bfloat16, sizes in multiples of 8 and a GPU of compute capability 9 or 10",
        why,
    )
