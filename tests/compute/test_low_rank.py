"""Low-rank parts of experts against matrices to which they were added."""

import importlib.util
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from overspill.compute import grouped
from overspill.compute.activation import Differentiated
from overspill.compute.experts import split_records, wave_backward, wave_forward
from overspill.compute.low_rank import Adapters, LowRank
from overspill.tiers.layout import LowRanks, RecordLayout
from tests.compute.waves import Case, clamped_gate
from tests.slow import slow_rows

COUNTS = (5, 0, 11, 3)
RANK, SCALE = 3, 1.7
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-5}
needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(),
    reason="Triton is not installed, or compiles for the GPU",
)


def new_case(dtype: torch.dtype, device: str, plain: bool) -> Case:
    more = {} if plain else {"bias": True, "transposed": True, "activation": clamped_gate}
    return Case.make(dtype=dtype, device=device, n_tokens=sum(COUNTS), padding=0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "dtype", "device"),
    [
        ("loop", torch.float32, "cpu"),
        ("torch", torch.bfloat16, "cpu"),
        pytest.param("triton", torch.float32, "cpu", marks=needs_interpreter),
        pytest.param("loop", torch.float32, "cuda", marks=pytest.mark.gpu),
        pytest.param("torch", torch.bfloat16, "cuda", marks=pytest.mark.gpu),
        pytest.param("triton", torch.bfloat16, "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    ("matrices", "layout"),
    slow_rows([("both", "transposed"), ("w_in", "plain"), ("w_out", "plain")], 1, 2),
)
def test_products_and_gradients(
    backend: grouped.Backend, dtype: torch.dtype, device: str, matrices: str, layout: str
) -> None:
    torch.manual_seed(0)
    case = new_case(dtype, device, layout == "plain")
    n, shape = len(COUNTS), case.shape
    records = case.records[:n]
    sizes = [(shape.in_rows, shape.d_model), (shape.d_model, shape.d_hidden)]
    factors = [
        (
            (0.3 * torch.randn(n, RANK, columns)).to(device),
            (0.3 * torch.randn(n, rows, RANK)).to(device),
        )
        for rows, columns in sizes
    ]
    used = [matrices in ("both", name) for name in ("w_in", "w_out")]
    adapters = Adapters(
        *(
            LowRank.of(a, b, SCALE, None, dtype) if use else None
            for (a, b), use in zip(factors, used, strict=True)
        )
    )
    counts, ends = (
        list(COUNTS),
        torch.tensor([*accumulate(COUNTS)], dtype=torch.int32, device=device),
    )
    row_weight = case.weights[:, 0].contiguous()
    activation = None if case.activation is None else Differentiated(case.activation)
    given = records, shape, ends, counts
    with grouped.forced(backend):
        y, hidden = wave_forward(case.x, *given, activation, adapters=adapters)
        grads = wave_backward(
            case.x, case.dy, row_weight, *given, activation=activation, adapters=adapters
        )
        kept = wave_backward(
            case.x, case.dy, row_weight, *given, hidden, activation=activation, adapters=adapters
        )

        layout = RecordLayout(shape, dtype, ranks=LowRanks(*(RANK * use for use in used)))
        stored = _behind_weights(layout, records, adapters)
        of_records = Adapters.of_records(layout, stored)
        in_records, _ = wave_forward(case.x, stored, *given[1:], activation, adapters=of_records)

    expected_y, expected = _by_autograd(case.wide(), row_weight, factors, used)
    atol = TOLERANCE[dtype] * float(expected_y.abs().max())
    torch.testing.assert_close(in_records.float(), expected_y, rtol=0, atol=atol)
    found = [y, grads.dx_RD, grads.drow_weight_R]
    for use, low, scale in zip(used, grads.adapters, (SCALE, SCALE), strict=True):
        assert (low is not None) == use
        if low is not None:
            assert not low.a_nrI[:, RANK:].any()
            assert not low.b_nOr[:, :, RANK:].any()
            found += [low.a_nrI[:, :RANK] * scale, low.b_nOr[:, :, :RANK] * scale]
    for mine, theirs in zip(found, [expected_y, *expected], strict=True):
        atol = TOLERANCE[dtype] * float(theirs.abs().max())
        torch.testing.assert_close(mine.float(), theirs, rtol=0, atol=atol)
    torch.testing.assert_close(kept.dx_RD, grads.dx_RD)


def _behind_weights(layout: RecordLayout, records: Tensor, adapters: Adapters) -> Tensor:
    """Records with the low-rank matrices too, in memory with gaps between them."""
    numel, dtype = layout.stored
    stored = records.new_zeros(len(records), numel + 64, dtype=dtype)[:, :numel]
    stored[:, : layout.shape.numel] = records
    for planes, own in zip(layout.low_rank, adapters, strict=True):
        if planes is not None and own is not None:
            a, b = planes.of(stored)
            a.copy_(own.a_nrI)
            b.copy_(own.b_nOr * own.scale)
    return stored


def _by_autograd(
    case: Case, row_weight: Tensor, factors: list[tuple[Tensor, Tensor]], used: list[bool]
) -> tuple[Tensor, list[Tensor]]:
    """y, and the gradients of x, the routing weights and the factors that are used."""
    leaves = [each.clone().requires_grad_() for pair in factors for each in pair]
    x, weight = case.x.clone().requires_grad_(), row_weight.clone().requires_grad_()
    w_in, w_out, *biases = split_records(case.records, case.shape)
    if case.shape.transposed:
        w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
    ys = []
    for expert, (start, stop) in enumerate(pairwise([0, *accumulate(COUNTS)])):
        full = [w_in[expert], w_out[expert]]
        for number, use in enumerate(used):
            if use:
                a, b = leaves[2 * number][expert], leaves[2 * number + 1][expert]
                full[number] = full[number] + SCALE * b @ a
        h = x[start:stop] @ full[0].t() + (biases[0][expert] if biases else 0)
        if case.activation is None:
            gate, up = h.chunk(2, dim=-1)
            h = torch.nn.functional.silu(gate) * up
        else:
            h = case.activation(h)
        ys.append(h @ full[1].t() + (biases[1][expert] if biases else 0))
    y = torch.cat(ys)
    (y * weight.unsqueeze(-1)).backward(case.dy)
    grads = [x.grad, weight.grad]
    grads += [leaf.grad for number, leaf in enumerate(leaves) if used[number // 2]]
    assert all(grad is not None for grad in grads)
    return y.detach(), [grad for grad in grads if grad is not None]
