"""The choice of experts compared with torch, in Triton's interpreter and on a GPU."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from overspill.compute.decode.constants import ABSENT
from overspill.compute.misses import MissBuffers
from tests.compute.decode.near import NAN, assert_near, needs_triton, random
from tests.compute.test_grouped_triton import FP32, every_device, every_dtype

pytestmark = needs_triton


@pytest.fixture
def routing() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute.decode import routing

    return routing


def miss_buffers(
    n_rows: int, top_k: int, width: int, dtype: torch.dtype, device: str
) -> MissBuffers:
    def ints(count: int) -> Tensor:
        return torch.full((count,), -7, dtype=torch.int32, device=device)

    pairs = n_rows * top_k
    x = torch.full((n_rows, width), -7.0, dtype=dtype, device=device)
    weights = torch.full((pairs,), -7.0, device=device)
    lists = ints(pairs), ints(pairs), weights, x, x.float(), ints(pairs), ints(1)
    return MissBuffers(ints(1), ints(1), ints(1), ints(1), *lists)


def chosen(
    logits: Tensor, top_k: int, softmax_first: bool, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Choose experts; of experts with the same score the first ones."""
    scores = logits.double().softmax(-1) if softmax_first else logits.double()
    weights, ids = scores.sort(stable=True, descending=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if not softmax_first:
        return ids, weights.softmax(-1)
    return ids, weights / weights.sum(-1, keepdim=True) if normalize else weights


def route(
    routing: Any,
    logits: Tensor,
    top_k: int,
    softmax_first: bool,
    normalize: bool,
    table: Tensor,
    x: Tensor,
    buffers: Any = None,
    real: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Any]:
    """The ids, and what else the kernel gives."""
    ids = torch.empty(len(x), top_k, dtype=torch.int32, device=x.device)
    if real is None:
        real = torch.ones(len(x), dtype=torch.int64, device=x.device)
    choice = top_k, softmax_first, normalize
    got = routing.route(logits, *choice, table, real, x, ids, buffers, scale=scale)
    return ids.long(), got


ROUTERS = pytest.mark.parametrize(
    ("softmax_first", "normalize"), [(True, False), (True, True), (False, True)]
)


@every_device
@every_dtype
@ROUTERS
@pytest.mark.parametrize(("n_experts", "top_k"), [(6, 3), (8, 2), (5, 1), (4, 4)])
def test_the_experts_with_the_highest_scores_are_chosen(
    routing: Any,
    n_experts: int,
    top_k: int,
    softmax_first: bool,
    normalize: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    logits = random(3, n_experts, dtype=dtype, device=device)
    logits[1] = logits[1, 0]  # ties
    logits[2, 1:4] = 2.0
    table = torch.randperm(100, device=device)[:n_experts] * 16 - 800
    x = random(3, 20, dtype=dtype, device=device)
    found, got = route(routing, logits, top_k, softmax_first, normalize, table, x)
    ids, weights = chosen(logits, top_k, softmax_first, normalize)
    assert torch.equal(found, ids)
    assert_near(got.weights, weights, FP32)
    assert torch.equal(got.offsets, table[ids])
    assert got.missed_B is None


@every_device
@every_dtype
@ROUTERS
def test_experts_that_are_not_on_the_device_are_listed_with_their_token_rows(
    routing: Any, softmax_first: bool, normalize: bool, dtype: torch.dtype, device: str
) -> None:
    top_k, width = 3, 20
    logits = torch.tensor([[5, 4, 3, 0, 0], [0, 0, 3, 4, 5], [9, 1, 2, 3, 0.0]]).to(device, dtype)
    table = torch.tensor([ABSENT, 32, -64, ABSENT, 0], device=device)
    logits[1, 3] = -1.0  # the experts of this row are all there
    logits[1, 1] = 4.0
    x = random(3, width, dtype=dtype, device=device)
    buffers = miss_buffers(4, top_k, width, dtype, device)
    found, got = route(
        routing, logits, top_k, softmax_first, normalize, table, x, buffers, scale=0.8
    )
    ids, weights = chosen(logits, top_k, softmax_first, normalize)
    weights = weights * 0.8
    assert ids.tolist() == [[0, 1, 2], [4, 1, 2], [0, 3, 2]]
    assert torch.equal(found, ids)
    assert torch.equal(got.offsets, table[ids])
    assert got.missed_B.tolist() == [1, 0, 2]
    assert buffers.experts_P.tolist() == [0, -1, -1, -1, -1, -1, 0, 3, -1, -7, -7, -7]
    assert_near(buffers.weights_P[:9], weights.flatten(), FP32)
    assert (buffers.count.item(), buffers.n_rows.item()) == (9, 3)
    assert torch.equal(buffers.x_RD[[0, 2]], x[[0, 2]])
    assert (buffers.x_RD[[1, 3]] == -7).all(), "rows without misses are not written"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@every_device
@ROUTERS
def test_logits_that_are_nan_or_infinite_give_valid_experts(
    routing: Any, softmax_first: bool, normalize: bool, device: str
) -> None:
    logits = torch.randn(6, 5, device=device)
    logits[0] = NAN
    logits[1, 2] = NAN
    logits[2] = math.inf
    logits[3, 1] = math.inf
    logits[4] = -math.inf
    logits[5, :4] = -math.inf
    table = torch.tensor([16, ABSENT, 48, 64, 80], device=device)
    x = torch.randn(6, 20, device=device)
    buffers = miss_buffers(6, 3, 20, FP32, device)
    ids, got = route(routing, logits, 3, softmax_first, normalize, table, x, buffers)
    assert ((ids >= 0) & (ids < 5)).all()
    assert torch.equal(got.offsets, table[ids])
    assert ((buffers.experts_P == -1) | (buffers.experts_P == 1)).all()
    assert ids[3, 0] == 1 or softmax_first  # inf - inf is NaN


@every_device
def test_rows_that_are_not_real_have_no_experts(routing: Any, device: str) -> None:
    logits, x = torch.randn(2, 4, device=device), torch.randn(2, 8, device=device)
    table = torch.tensor([16, ABSENT, 48, ABSENT], device=device)
    buffers = miss_buffers(2, 4, 8, FP32, device)
    real = torch.tensor([1, 0], device=device)
    ids, got = route(routing, logits, 4, True, True, table, x, buffers, real)
    assert got.missed_B.tolist() == [2, 0]
    assert torch.equal(got.offsets[0], table[ids[0]])
    assert (got.offsets[1] == ABSENT).all()
    assert (buffers.experts_P[4:] == -1).all()


@every_device
def test_given_experts_are_looked_up_instead_of_the_chosen_ones(routing: Any, device: str) -> None:
    logits, x = torch.randn(3, 6, device=device), torch.randn(3, 8, device=device)
    table = torch.tensor([0, 16, ABSENT, 48, ABSENT, 80], device=device)
    real = torch.ones(3, dtype=torch.int64, device=device)
    ids = torch.tensor([[2, 3], [5, 0], [4, 2]], dtype=torch.int32, device=device)
    given, buffers = ids.clone(), miss_buffers(3, 2, 8, FP32, device)
    got = routing.route(logits, 2, True, True, table, real, x, given, buffers, given=True)
    assert torch.equal(given, ids)
    assert_near(got.weights, chosen(logits, 2, True, True)[1], FP32)
    others = miss_buffers(3, 2, 8, FP32, device)
    again = routing.look_up(ids, got.weights, table, real, x, others)
    for each, to in ((got, buffers), (again, others)):
        assert torch.equal(each.offsets, table[ids.long()])
        assert each.missed_B.tolist() == [1, 0, 2]
        assert to.experts_P.tolist() == [2, -1, -1, -1, 4, 2]
        assert torch.equal(to.x_RD[[0, 2]], x[[0, 2]])
        assert torch.equal(to.weights_P, got.weights.flatten())


@every_device
def test_some_missing_experts_are_found_over_the_link(routing: Any, device: str) -> None:
    """Three of four of those that any row misses; all rows agree which."""
    x = torch.randn(3, 8, device=device)
    table = torch.tensor([0, ABSENT, ABSENT, 48, ABSENT, ABSENT, ABSENT], device=device)
    pinned = 1000 + torch.arange(7, device=device)
    real = torch.tensor([1, 1, 0], device=device)
    ids = torch.tensor([[2, 0, 5], [5, 6, 1], [4, 4, 4]], dtype=torch.int32, device=device)
    weights, buffers = torch.rand(3, 3, device=device), miss_buffers(3, 3, 8, FP32, device)
    link = routing.PinnedExperts(pinned, 12)
    got = routing.look_up(ids, weights, table, real, x, buffers, link)
    # 1, 2, 5 and 6 are missing; a row that is not real needs nothing
    assert got.offsets.tolist() == [[1002, 0, 1005], [1005, 1006, ABSENT], [ABSENT] * 3]
    assert got.missed_B.tolist() == [0, 1, 0]
    assert buffers.experts_P.tolist() == [-1, -1, -1, -1, -1, 1, -1, -1, -1]
    assert torch.equal(buffers.x_RD[1], x[1])
    assert (buffers.x_RD[[0, 2]] == -7).all()
