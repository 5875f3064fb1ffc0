"""One pass through the experts of all ranks: token rows travel in groups of experts.

S sends the rows of a group to the ranks that compute them, C computes its experts, R returns the
results; `pipeline.schedule` has their order. Groups are neighbouring experts of each rank, so each
expert is uploaded once, and C waits for the rows of its own group alone. Resident experts on the
device come first: they wait for no upload.

Memory: received rows and results of all groups lie in tensors of this pass. What is sent is copied
group by group, and held until its exchange has ended.
"""

from functools import cached_property

from torch import Tensor

from overspill.core.experts import Phase
from overspill.moe.engine import Engine
from overspill.moe.expert_pass import BackwardPass, ForwardPass
from overspill.moe.layer_pass import LayerPass
from overspill.moe.pipeline.schedule import run_pipeline
from overspill.parallel.row_exchange import (
    RowExchange,
    SentRows,
    combine_grads,
    combine_results,
)
from overspill.transfer.work_stream import Arrival


class _Exchanged:
    """What forward and backward have in common."""

    def __init__(self, engine: Engine, layer_pass: LayerPass) -> None:
        assert engine.rank_rows is not None
        assert layer_pass.sent is not None
        self._engine, self._pass = engine, layer_pass
        self._exchange: RowExchange = engine.rank_rows.exchange
        self._rows: SentRows = layer_pass.sent

    def finish(self, number: int, rows: list[Tensor]) -> None:
        """All results are used at once, after the last group."""


class _Forward(_Exchanged):
    def __init__(
        self, x_TD: Tensor, engine: Engine, layer_pass: LayerPass, phase: Phase, keep: bool
    ) -> None:
        super().__init__(engine, layer_pass)
        self._x_TD, self._phase, self._keep = x_TD, phase, keep
        self.x_ND = self._rows.received_like(x_TD)

    @cached_property
    def y_RD(self) -> Tensor:
        """Allocated when the first results return: the first group computes before."""
        return self._rows.returned_like(self._x_TD)

    @cached_property
    def _experts(self) -> ForwardPass:
        """Entered when the first rows are on their way."""
        args = self._rows.expert_ids_N1, self._engine, self._pass, self._phase, self._keep
        return ForwardPass(self.x_ND, *args)

    def send(self, number: int, sent: list[Arrival]) -> None:
        sent.append(self._exchange.send(self._rows, number, self._x_TD, self.x_ND))

    def compute(self, number: int, rows: list[Tensor], returned: list[Arrival]) -> None:
        experts = self._experts
        experts.compute(self._pass.group_positions(number))
        y_ND = experts.combine(None, self._rows.groups[number].computed)
        returned.append(self._exchange.send_back(self._rows, number, y_ND, self.y_RD))


class _Backward(_Exchanged):
    def __init__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        dy_TD: Tensor,
        engine: Engine,
        layer_pass: LayerPass,
        need_dw: bool,
    ) -> None:
        super().__init__(engine, layer_pass)
        self._x_TD, self._dy_TD, self._weights_TK = x_TD, dy_TD, weights_TK
        self._need_dw = need_dw
        self._kept_ND = layer_pass.received
        rows = self._rows
        self._x_ND = rows.received_like(x_TD) if self._kept_ND is None else self._kept_ND
        self._dy_ND = rows.received_like(dy_TD)
        self._weights_N1 = rows.received_like(weights_TK[:, :1])

    @cached_property
    def dx_RD(self) -> Tensor:
        return self._rows.returned_like(self._x_TD)

    @cached_property
    def dweights_R1(self) -> Tensor:
        return self._rows.returned_like(self._weights_TK[:, :1])

    @cached_property
    def experts(self) -> BackwardPass:
        received = self._x_ND, self._weights_N1, self._dy_ND
        return BackwardPass(*received, self._engine, self._pass, self._need_dw)

    def send(self, number: int, sent: list[Arrival]) -> None:
        rows, exchange = self._rows, self._exchange
        sent.append(exchange.send(rows, number, self._dy_TD, self._dy_ND))
        if self._kept_ND is None:
            sent.append(exchange.send(rows, number, self._x_TD, self._x_ND))
        sent.append(exchange.send_weights(rows, number, self._weights_TK, self._weights_N1))

    def compute(self, number: int, rows: list[Tensor], returned: list[Arrival]) -> None:
        self.experts.compute(self._pass.group_positions(number))
        dx_ND, dweights_N1 = self.experts.combine(self._rows.groups[number].computed)
        back = self._exchange.send_back
        returned.append(back(self._rows, number, dx_ND, self.dx_RD))
        returned.append(back(self._rows, number, dweights_N1, self.dweights_R1))


def exchanged_forward(
    x_TD: Tensor,
    weights_TK: Tensor,
    engine: Engine,
    layer_pass: LayerPass,
    phase: Phase,
    keep: bool,
) -> Tensor:
    """Each token's weighted sum over its experts, [T, D]. Entered by all ranks."""
    steps = _Forward(x_TD, engine, layer_pass, phase, keep)
    assert layer_pass.sent is not None
    assert engine.rank_rows is not None
    run_pipeline(len(layer_pass.sent.groups), steps)
    if layer_pass.training and engine.rank_rows.keeps(layer_pass):
        layer_pass.received = steps.x_ND
    return combine_results(layer_pass.sent, steps.y_RD, weights_TK)


def exchanged_backward(
    x_TD: Tensor,
    weights_TK: Tensor,
    dy_TD: Tensor,
    engine: Engine,
    layer_pass: LayerPass,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of tokens [T, D] and of routing weights [T, K]. Entered by all ranks."""
    steps = _Backward(x_TD, weights_TK, dy_TD, engine, layer_pass, need_dw)
    assert layer_pass.sent is not None
    run_pipeline(len(layer_pass.sent.groups), steps)
    steps.experts.finish()
    layer_pass.received = None
    return combine_grads(layer_pass.sent, steps.dx_RD, steps.dweights_R1)
