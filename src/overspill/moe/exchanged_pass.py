"""One pass through the experts of all ranks: token rows travel in groups of experts.

S sends the rows of a group to the ranks that compute them, C computes its experts, R returns the
results; `pipeline.schedule` has their order. Groups are neighbouring experts of each rank, so each
expert is uploaded once, and C waits for the rows of its own group alone. Resident experts on the
device come first: they wait for no upload.

Memory: received rows and results of all groups lie in tensors of this pass. What is sent is copied
group by group, and held until its exchange has ended.
"""

from torch import Tensor

from overspill.core.experts import Phase
from overspill.moe.engine import Engine
from overspill.moe.expert_pass import BackwardPass, ForwardPass
from overspill.moe.layer_pass import LayerPass
from overspill.moe.pipeline.schedule import run_pipeline
from overspill.parallel.row_exchange import combine_grads, combine_results
from overspill.transfer.work_stream import Arrival


def exchanged_forward(
    x_TD: Tensor,
    weights_TK: Tensor,
    engine: Engine,
    layer_pass: LayerPass,
    phase: Phase,
    keep: bool,
) -> Tensor:
    """Each token's weighted sum over its experts, [T, D]. Entered by all ranks."""
    rank_rows, rows = engine.rank_rows, layer_pass.sent
    assert rank_rows is not None
    assert rows is not None
    exchange = rank_rows.exchange
    x_ND = rows.received_like(x_TD)
    experts: ForwardPass
    y_RD: Tensor

    def send(number: int, sent: list[Arrival]) -> None:
        sent.append(exchange.send(rows, number, x_TD, x_ND))

    def compute(number: int, received: list[Tensor], returned: list[Arrival]) -> None:
        nonlocal experts, y_RD
        if number == 0:  # entered when the first rows are on their way
            experts = ForwardPass(x_ND, rows.expert_ids_N1, engine, layer_pass, phase, keep)
        experts.compute(layer_pass.group_positions(number))
        y_ND = experts.combine(None, rows.groups[number].computed)
        if number == 0:  # not earlier: the first group computes without this memory
            y_RD = rows.returned_like(x_TD)
        returned.append(exchange.send_back(rows, number, y_ND, y_RD))

    run_pipeline(len(rows.groups), send, compute)
    if layer_pass.training and rank_rows.keeps(layer_pass):
        layer_pass.received = x_ND
    return combine_results(rows, y_RD, weights_TK)


def exchanged_backward(
    x_TD: Tensor,
    weights_TK: Tensor,
    dy_TD: Tensor,
    engine: Engine,
    layer_pass: LayerPass,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of tokens [T, D] and of routing weights [T, K]. Entered by all ranks."""
    rows, kept_ND = layer_pass.sent, layer_pass.received
    assert engine.rank_rows is not None
    assert rows is not None
    exchange = engine.rank_rows.exchange
    x_ND = rows.received_like(x_TD) if kept_ND is None else kept_ND
    dy_ND = rows.received_like(dy_TD)
    weights_N1 = rows.received_like(weights_TK[:, :1])
    experts: BackwardPass
    dx_RD: Tensor
    dweights_R1: Tensor

    def send(number: int, sent: list[Arrival]) -> None:
        sent.append(exchange.send(rows, number, dy_TD, dy_ND))
        if kept_ND is None:
            sent.append(exchange.send(rows, number, x_TD, x_ND))
        sent.append(exchange.send_weights(rows, number, weights_TK, weights_N1))

    def compute(number: int, received: list[Tensor], returned: list[Arrival]) -> None:
        nonlocal experts, dx_RD, dweights_R1
        if number == 0:
            experts = BackwardPass(x_ND, weights_N1, dy_ND, engine, layer_pass, need_dw)
        experts.compute(layer_pass.group_positions(number))
        dx_ND, dweights_N1 = experts.combine(rows.groups[number].computed)
        if number == 0:
            dx_RD = rows.returned_like(x_TD)
        returned.append(exchange.send_back(rows, number, dx_ND, dx_RD))
        if number == 0:
            dweights_R1 = rows.returned_like(weights_TK[:, :1])
        returned.append(exchange.send_back(rows, number, dweights_N1, dweights_R1))

    run_pipeline(len(rows.groups), send, compute)
    experts.finish()
    layer_pass.received = None
    return combine_grads(rows, dx_RD, dweights_R1)
