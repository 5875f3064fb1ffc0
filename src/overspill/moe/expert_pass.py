"""One pass through the experts that this process computes, wave by wave.

Shapes: T tokens, D model, K top-k, R token rows sorted by expert. With several ranks the tokens are
rows of all of them, each for one expert.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from overspill.compute.dropout import RowDropout, Site
from overspill.compute.experts import WaveGrads, wave_backward, wave_forward
from overspill.core.experts import Phase
from overspill.moe.code_products import without_few_rows
from overspill.moe.engine import Engine
from overspill.moe.layer_pass import LayerPass, Wave
from overspill.moe.pooled_experts import PooledExperts
from overspill.moe.streaming.cpu_experts import CpuJob
from overspill.moe.unpacking import unpacked
from overspill.plan.waves import row_pieces

_ALL = slice(None)


class ForwardPass:
    """The order of calls: `compute` for all experts, or for each group of them, then `combine`. The
    results of a group can be combined before the next one is computed."""

    def __init__(
        self,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        engine: Engine,
        layer_pass: LayerPass,
        phase: Phase,
        keep: bool,
    ) -> None:
        """`x_TD` may be written until the experts that read it are computed."""
        self._x_TD, self._engine, self._pass, self._phase = x_TD, engine, layer_pass, phase
        self._compute = engine.compute
        self._compute.enter_forward(layer_pass, expert_ids_TK, phase, keep)
        _enter_adapters(layer_pass, x_TD)
        self._on_cpu: CpuJob | None = None
        if layer_pass.on_cpu:
            self._on_cpu = self._compute.cpu.forward(layer_pass, x_TD)
        n_rows = layer_pass.rows.n_rows
        self._y_RD = x_TD.new_empty(n_rows, x_TD.shape[1])
        if keep:
            layer_pass.kept = x_TD.new_empty(n_rows, engine.shape.in_rows)

    def compute(self, positions: Collection[int] | None = None) -> None:
        """The experts at these positions; None: all."""
        layer_pass, dispatcher = self._pass, self._compute.dispatcher
        waves = self._compute.waves(layer_pass, self._phase, positions)
        rows = layer_pass, dispatcher, self._x_TD, self._y_RD
        waves = without_few_rows(waves, self._engine.layout, *rows)
        packing = self._engine.layout, layer_pass.layer, self._engine.n_experts
        for wave in unpacked(waves, *packing):
            for start, end, ends, counts in _pieces(wave, self._compute.max_rows):
                x_rows = dispatcher.dispatch(layer_pass.rows, self._x_TD, start, end)
                args = wave.weights, self._engine.shape, ends, counts, layer_pass.activation
                dropout = _dropout(self._compute, layer_pass, Site.HIDDEN, start, end)
                adapters = layer_pass.adapters_of(wave)
                y_rows, hidden = wave_forward(x_rows, *args, dropout, adapters)
                if dropout := _dropout(self._compute, layer_pass, Site.OUTPUT, start, end):
                    y_rows = dropout.apply(y_rows, overwrite=True)
                self._y_RD = _with_rows(self._y_RD, start, y_rows)
                if layer_pass.kept is not None:
                    layer_pass.kept = _with_rows(layer_pass.kept, start, hidden)
                del args, dropout, x_rows, y_rows, hidden

    def combine(self, weights_TK: Tensor | None, tokens: slice = _ALL) -> Tensor:
        """The weighted sum over its rows of each token in a range; without weights the sum."""
        if self._on_cpu is not None:
            self._on_cpu.take(self._y_RD)
            self._on_cpu = None
        args = self._pass.rows, self._y_RD, weights_TK
        return self._compute.dispatcher.combine(*args, tokens)


class BackwardPass:
    """The order of calls: `compute` as in forward, `finish` after the last, and `combine` before it
    or after it. Weight gradients are delivered to the training step if they are needed."""

    def __init__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        dy_TD: Tensor,
        engine: Engine,
        layer_pass: LayerPass,
        need_dw: bool,
    ) -> None:
        self._x_TD, self._dy_TD, self._weights_TK = x_TD, dy_TD, weights_TK
        self._engine, self._pass, self._need_dw = engine, layer_pass, need_dw
        self._compute = engine.compute  # experts may have moved
        self._compute.enter_backward(layer_pass, need_dw)
        _enter_adapters(layer_pass, x_TD)
        n_rows = layer_pass.rows.n_rows
        self._dx_RD = x_TD.new_empty(n_rows, x_TD.shape[1])
        self._drow_weight_R = weights_TK.new_empty(n_rows)
        self._on_cpu: CpuJob | None = None
        if layer_pass.on_cpu:
            gradients = engine.training.place(layer_pass) if need_dw else {}
            args = layer_pass, x_TD, dy_TD, weights_TK, gradients
            self._on_cpu = self._compute.cpu.backward(*args)
        self._taken = self._on_cpu is None

    def compute(self, positions: Collection[int] | None = None) -> None:
        """The experts at these positions; None: all."""
        waves = self._compute.waves(self._pass, Phase.BACKWARD, positions)
        packing = self._engine.layout, self._pass.layer, self._engine.n_experts
        for wave in unpacked(waves, *packing):
            total = grads = None
            for start, end, ends, counts in _pieces(wave, self._compute.max_rows):
                grads = self._piece(wave, start, end, ends, counts)
                self._dx_RD = _with_rows(self._dx_RD, start, grads.dx_RD)
                self._drow_weight_R[start:end] = grads.drow_weight_R
                if self._pass.adapters is not None:
                    self._pass.adapters.add_grads(wave.first, wave.stop, grads.adapters)
                total = grads if total is None else _add(total, grads)
            if self._need_dw and total is not None:
                self._engine.training.deliver(self._pass, wave, total.dw)
            del total, grads  # before the next wave computes, not after

    def _piece(
        self, wave: Wave, start: int, end: int, ends: Tensor, counts: list[int] | None
    ) -> WaveGrads:
        layer_pass, dispatcher = self._pass, self._compute.dispatcher
        rows, kept = layer_pass.rows, layer_pass.kept
        dy_rows = dispatcher.dispatch(rows, self._dy_TD, start, end)
        if dropout := _dropout(self._compute, layer_pass, Site.OUTPUT, start, end):
            dy_rows = dropout.apply(dy_rows, overwrite=True)
        return wave_backward(
            dispatcher.dispatch(rows, self._x_TD, start, end),
            dy_rows,
            dispatcher.row_weights(rows, self._weights_TK, start, end),
            wave.weights,
            self._engine.shape,
            ends,
            counts,
            hidden=None if kept is None else kept[start:end],
            need_dw=self._need_dw,
            activation=layer_pass.activation,
            dropout=_dropout(self._compute, layer_pass, Site.HIDDEN, start, end),
            adapters=layer_pass.adapters_of(wave),
        )

    def finish(self) -> None:
        """End the pass, after the last expert was computed."""
        self._pass.kept = None
        self._take()
        if self._need_dw:
            if self._on_cpu is not None:
                self._engine.training.deliver_formed(self._pass, self._on_cpu.end)
            self._engine.training.end_backward(self._pass)

    def _take(self) -> None:
        """Wait for the results of the CPU, once."""
        if not self._taken:
            assert self._on_cpu is not None
            self._on_cpu.take(self._dx_RD, self._drow_weight_R)
            self._taken = True

    def combine(self, tokens: slice = _ALL) -> tuple[Tensor, Tensor]:
        """The gradients of a range of tokens and of their routing weights."""
        self._take()
        grads = self._dx_RD, self._drow_weight_R
        return self._compute.dispatcher.combine_grads(self._pass.rows, *grads, tokens)


def _dropout(
    compute: PooledExperts, layer_pass: LayerPass, site: Site, start: int, end: int
) -> RowDropout | None:
    """The dropout of the rows [start, end) of a pass."""
    if layer_pass.dropout is None:
        return None
    rows = compute.dispatcher.assignments(layer_pass.rows, start, end)
    return layer_pass.dropout.of_rows(site, rows)


def _enter_adapters(layer_pass: LayerPass, x_TD: Tensor) -> None:
    if layer_pass.adapters is not None:
        assert layer_pass.rows.experts is not None
        layer_pass.adapters.enter(layer_pass.rows.experts, x_TD.dtype)


def _with_rows(all_rows: Tensor, start: int, rows: Tensor) -> Tensor:
    """Copy the results of a wave to their place; if they are all, return them instead."""
    if len(rows) == len(all_rows):
        return rows
    all_rows[start : start + len(rows)] = rows
    return all_rows


def _pieces(wave: Wave, limit: int) -> list[tuple[int, int, Tensor, list[int] | None]]:
    """(first row, end, cumulative ends, counts) of a wave, whole or, where one expert alone has
    more token rows than the workspace holds, in pieces."""
    if wave.end - wave.start <= limit or wave.stop - wave.first > 1:
        return [(wave.start, wave.end, wave.ends, wave.counts)]
    pieces = row_pieces(wave.start, wave.end, limit)
    return [(a, b, torch.full_like(wave.ends, b - a), [b - a]) for a, b in pieces]


def _add(total: WaveGrads, grads: WaveGrads) -> WaveGrads:
    """Add the weight gradients of two pieces of one expert's rows, in float32 between pieces."""
    dw = tuple(a.float().add_(b) for a, b in zip(total.dw, grads.dw, strict=True))
    return WaveGrads(grads.dx_RD, dw, grads.drow_weight_R)
