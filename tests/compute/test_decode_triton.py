"""The decoding kernels compared with naive torch code, in Triton's interpreter and on a GPU."""

import dataclasses
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute.misses import MissBuffers
from overspill.core.experts import ExpertShape
from overspill.moe.state_dict import split_record
from tests.compute.test_grouped_triton import FP32, TOLERANCE, every_device, every_dtype

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
NAN = float("nan")
ABSENT = -(1 << 62)


@pytest.fixture
def kernels() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute import decode_triton

    return decode_triton


def random(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> Tensor:
    return torch.randn(shape).to(device, dtype)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    """`dtype` is that of the inputs; errors are relative to the largest value. The interpreter
    cuts values off where a GPU rounds them to bf16."""
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).abs().max()
    assert error <= roundings * TOLERANCE[dtype] * expected.double().abs().max()


# -- norms ----------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@every_device
@every_dtype
@pytest.mark.parametrize("n_parts", [0, 1, 2])
@pytest.mark.parametrize("width", [32, 20])
def test_parts_are_added_to_the_residual_before_its_norm(
    kernels: Any, n_parts: int, width: int, dtype: torch.dtype, device: str
) -> None:
    residual = random(3, width, dtype=dtype, device=device)
    before = residual.double()
    # what experts add is float32
    parts = [random(3, width, dtype=d, device=device) for d in (FP32, dtype)][:n_parts]
    weight = random(width, dtype=dtype, device=device)
    out = kernels.add_norm(residual, parts, weight, 1e-5)
    assert out.dtype is residual.dtype is dtype
    assert_near(residual, before + sum(part.double() for part in parts), dtype)
    if not parts:
        assert torch.equal(residual.double(), before)
    assert_near(out, rms_norm(residual, weight, 1e-5), dtype)


@every_device
@every_dtype
def test_rows_of_the_cpu_are_added_where_experts_were_missed_and_not_read_elsewhere(
    kernels: Any, dtype: torch.dtype, device: str
) -> None:
    residual = random(4, 20, dtype=dtype, device=device)
    parts = [random(4, 20, device=device) for _ in range(2)]
    weight = random(20, dtype=dtype, device=device)
    rows = random(6, 20, device=device)  # of the largest batch
    missed = torch.tensor([2, 0, 1, 0], dtype=torch.int32, device=device)
    added = rows[:4].double() * missed.bool()[:, None]
    rows[1] = rows[3:] = NAN
    for n_parts in (1, 2):
        mine, expected = residual.clone(), residual.double() + added
        for part in parts[:n_parts]:
            expected += part.double()
        host = kernels.HostRows(rows, missed, torch.ones_like(missed[:1]))
        out = kernels.add_norm(mine, parts[:n_parts], weight, 1e-6, host)
        assert_near(mine, expected, dtype)
        assert_near(out, rms_norm(mine, weight, 1e-6), dtype)


# -- dense products -------------------------------------------------------------------------------


@every_device
@every_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_rows", "n", "width"), [(1, 7, 20), (3, 8, 32), (2, 3, 2100)])
def test_rows_are_multiplied_by_a_matrix(
    kernels: Any, n_rows: int, n: int, width: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    x, w = (random(rows, width, dtype=dtype, device=device) for rows in (n_rows, n))
    b = random(n, dtype=dtype, device=device) if bias else None
    expected = F.linear(x.double(), w.double(), None if b is None else b.double())
    out = kernels.linear(x, w, b)
    assert out.dtype is dtype
    assert_near(out, expected, dtype)
    wide = kernels.linear(x, w, b, FP32)
    assert wide.dtype is FP32
    assert_near(wide, expected, FP32)


@every_device
@every_dtype
@pytest.mark.parametrize("width", [40, 1030])
def test_large_matrices_are_read_in_other_pieces(
    kernels: Any, width: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "LARGE", 1)
    x, w = (random(rows, width, dtype=dtype, device=device) for rows in (2, 19))
    b = random(19, dtype=dtype, device=device)
    assert_near(kernels.linear(x, w, b), F.linear(x.double(), w.double(), b.double()), dtype)


# -- attention ------------------------------------------------------------------------------------

SIZE = 4
"""Slots of a block."""


def blocks_of(positions: list[int], n_blocks: int, device: str, size: int = SIZE) -> Tensor:
    """Blocks of each sequence up to its position, in any order; what follows is never read. A view
    of wider rows, as in the decoding step."""
    order = iter(torch.randperm(n_blocks).tolist())
    counts = [position // size + 1 for position in positions]
    rows = torch.full((len(positions), 2 + max(counts)), 10**9)
    for row, count in zip(rows, counts, strict=True):
        row[2 : 2 + count] = torch.tensor([next(order) for _ in range(count)])
    return rows.to(device)[:, 2:]


def slot_of(blocks: Tensor, sequence: int, position: int, size: int = SIZE) -> int:
    return int(blocks[sequence, position // size]) * size + position % size


@every_device
@every_dtype
@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("norms", [False, True])
def test_queries_and_keys_are_rotated_and_stored_in_the_slots_of_their_tokens(
    kernels: Any, width: int, norms: bool, dtype: torch.dtype, device: str
) -> None:
    heads, kv_heads, positions = 4, 2, [0, 3, 4, 10]
    make = {"dtype": dtype, "device": device}
    qkv = random(4, (heads + 2 * kv_heads) * width, **make)
    angles = torch.rand(12, width // 2)
    tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    weights = (random(width, **make), random(width, **make)) if norms else None
    blocks = blocks_of(positions, 9, device)
    cache = tuple(random(9 * SIZE, kv_heads, width, **make) for _ in range(2))
    keys, values = (each.double() for each in cache)
    where = torch.tensor(positions, device=device), blocks, SIZE
    q = kernels.rotate_and_store(qkv, tables, weights, 1e-5, *where, cache)

    def rotated(x: Tensor, norm: int, position: int) -> Tensor:
        if weights is not None:
            x = rms_norm(x, weights[norm], 1e-5)
        (first, second), (cos, sin) = x.chunk(2, -1), (t[position].double() for t in tables)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    parts = qkv.double().unflatten(1, (-1, width)).split([heads, kv_heads, kv_heads], 1)
    expected = []
    for sequence, position in enumerate(positions):
        slot = slot_of(blocks, sequence, position)
        expected.append(rotated(parts[0][sequence], 0, position))
        keys[slot] = rotated(parts[1][sequence], 1, position)
        values[slot] = parts[2][sequence]
    assert q.dtype is dtype
    assert_near(q, torch.stack(expected), dtype)
    assert_near(cache[0], keys, dtype)
    assert torch.equal(cache[1].double(), values)


@every_device
@every_dtype
@pytest.mark.parametrize(
    ("heads", "width", "window", "sinks"),
    [(4, 8, None, False), (6, 12, None, True), (2, 20, 5, False), (4, 8, 70, True)],
    ids=["groups of 2", "groups of 3 and sinks", "window", "window over parts and sinks"],
)
@pytest.mark.parametrize(
    ("positions", "size"),
    [([0, 3, 4, 11], SIZE), ([63, 64, 140], 16)],
    ids=["one part", "several parts"],
)
def test_a_token_attends_to_those_before_it_in_their_blocks(
    kernels: Any,
    positions: list[int],
    size: int,
    heads: int,
    width: int,
    window: int | None,
    sinks: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    """All other slots are NaN."""
    n_blocks, kv_heads, scale = 24, 2, 0.3
    make = {"dtype": dtype, "device": device}
    blocks = blocks_of(positions, n_blocks, device, size)
    q = random(len(positions), heads, width, **make)
    sink = random(heads, **make) if sinks else None
    keys, values = (torch.full((n_blocks * size, kv_heads, width), NAN, **make) for _ in range(2))
    expected = []
    for sequence, position in enumerate(positions):
        slots = [slot_of(blocks, sequence, at, size) for at in range(position + 1)]
        keys[slots], values[slots] = (random(len(slots), kv_heads, width, **make) for _ in range(2))
        seen = slots if window is None else slots[-window:]
        k, v = (t[seen].double().repeat_interleave(heads // kv_heads, 1) for t in (keys, values))
        scores = torch.einsum("hd,lhd->hl", q[sequence].double(), k) * scale
        if sink is not None:
            scores = torch.cat((scores, sink.double()[:, None]), 1)
        shares = scores.softmax(1)[:, : len(seen)]
        expected.append(torch.einsum("hl,lhd->hd", shares, v).flatten())
    where = torch.tensor(positions, device=device), blocks, size
    out = kernels.attend(q, (keys, values), *where, scale, window, sink)
    assert out.dtype is dtype
    assert_near(out, torch.stack(expected), dtype)


# -- experts --------------------------------------------------------------------------------------


def miss_buffers(
    n_rows: int, top_k: int, width: int, dtype: torch.dtype, device: str
) -> MissBuffers:
    def ints(count: int) -> Tensor:
        return torch.full((count,), -7, dtype=torch.int32, device=device)

    pairs = n_rows * top_k
    x = torch.full((n_rows, width), -7.0, dtype=dtype, device=device)
    weights = torch.full((pairs,), -7.0, device=device)
    rows = ints(1), ints(1), ints(1), ints(1), ints(pairs), ints(pairs), weights, x, x.float()
    return MissBuffers(*rows)


def chosen(
    logits: Tensor, top_k: int, softmax_first: bool, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Of experts with the same score the first ones."""
    scores = logits.double().softmax(-1) if softmax_first else logits.double()
    weights, ids = scores.sort(stable=True, descending=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if not softmax_first:
        return ids, weights.softmax(-1)
    return ids, weights / weights.sum(-1, keepdim=True) if normalize else weights


def route(
    kernels: Any,
    logits: Tensor,
    top_k: int,
    softmax_first: bool,
    normalize: bool,
    table: Tensor,
    x: Tensor,
    buffers: Any = None,
    real: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """The ids, and what else the kernel gives."""
    ids = torch.empty(len(x), top_k, dtype=torch.int32, device=x.device)
    if real is None:
        real = torch.ones(len(x), dtype=torch.int64, device=x.device)
    got = kernels.route(logits, top_k, softmax_first, normalize, table, real, x, ids, buffers)
    return ids.long(), got


ROUTERS = pytest.mark.parametrize(
    ("softmax_first", "normalize"), [(True, False), (True, True), (False, True)]
)


@every_device
@every_dtype
@ROUTERS
@pytest.mark.parametrize(("n_experts", "top_k"), [(6, 3), (8, 2), (5, 1), (4, 4)])
def test_the_experts_with_the_highest_scores_are_chosen(
    kernels: Any,
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
    found, got = route(kernels, logits, top_k, softmax_first, normalize, table, x)
    ids, weights = chosen(logits, top_k, softmax_first, normalize)
    assert torch.equal(found, ids)
    assert_near(got.weights, weights, FP32)
    assert torch.equal(got.offsets, table[ids])
    assert got.missed_B is None


@every_device
@every_dtype
@ROUTERS
def test_experts_that_are_not_on_the_device_are_listed_with_their_token_rows(
    kernels: Any, softmax_first: bool, normalize: bool, dtype: torch.dtype, device: str
) -> None:
    top_k, width = 3, 20
    logits = torch.tensor([[5, 4, 3, 0, 0], [0, 0, 3, 4, 5], [9, 1, 2, 3, 0.0]]).to(device, dtype)
    table = torch.tensor([ABSENT, 32, -64, ABSENT, 0], device=device)
    logits[1, 3] = -1.0  # the experts of this row are all there
    logits[1, 1] = 4.0
    x = random(3, width, dtype=dtype, device=device)
    buffers = miss_buffers(4, top_k, width, dtype, device)
    found, got = route(kernels, logits, top_k, softmax_first, normalize, table, x, buffers)
    ids, weights = chosen(logits, top_k, softmax_first, normalize)
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
    kernels: Any, softmax_first: bool, normalize: bool, device: str
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
    ids, got = route(kernels, logits, 3, softmax_first, normalize, table, x, buffers)
    assert ((ids >= 0) & (ids < 5)).all()
    assert torch.equal(got.offsets, table[ids])
    assert ((buffers.experts_P == -1) | (buffers.experts_P == 1)).all()
    assert ids[3, 0] == 1 or softmax_first  # inf - inf is NaN


@every_device
def test_rows_that_are_not_real_have_no_experts(kernels: Any, device: str) -> None:
    logits, x = torch.randn(2, 4, device=device), torch.randn(2, 8, device=device)
    table = torch.tensor([16, ABSENT, 48, ABSENT], device=device)
    buffers = miss_buffers(2, 4, 8, FP32, device)
    real = torch.tensor([1, 0], device=device)
    ids, got = route(kernels, logits, 4, True, True, table, x, buffers, real)
    assert got.missed_B.tolist() == [2, 0]
    assert torch.equal(got.offsets[0], table[ids[0]])
    assert (got.offsets[1] == ABSENT).all()
    assert (buffers.experts_P[4:] == -1).all()


@every_device
def test_given_experts_are_looked_up_instead_of_the_chosen_ones(kernels: Any, device: str) -> None:
    logits, x = torch.randn(3, 6, device=device), torch.randn(3, 8, device=device)
    table = torch.tensor([0, 16, ABSENT, 48, ABSENT, 80], device=device)
    real = torch.ones(3, dtype=torch.int64, device=device)
    ids = torch.tensor([[2, 3], [5, 0], [4, 2]], dtype=torch.int32, device=device)
    given, buffers = ids.clone(), miss_buffers(3, 2, 8, FP32, device)
    got = kernels.route(logits, 2, True, True, table, real, x, given, buffers, given=True)
    assert torch.equal(given, ids)
    assert_near(got.weights, chosen(logits, 2, True, True)[1], FP32)
    others = miss_buffers(3, 2, 8, FP32, device)
    again = kernels.look_up(ids, got.weights, table, real, x, others)
    for each, to in ((got, buffers), (again, others)):
        assert torch.equal(each.offsets, table[ids.long()])
        assert each.missed_B.tolist() == [1, 0, 2]
        assert to.experts_P.tolist() == [2, -1, -1, -1, 4, 2]
        assert torch.equal(to.x_RD[[0, 2]], x[[0, 2]])
        assert torch.equal(to.weights_P, got.weights.flatten())


LAYOUTS = {
    "silu": ("SILU", ExpertShape(20, 9, gated=True)),
    "silu, aligned": ("SILU", ExpertShape(16, 8, gated=True)),
    "gelu": ("GELU", ExpertShape(20, 9, gated=False)),
    "clamped, with biases and transposed": (
        "CLAMPED",
        ExpertShape(20, 9, gated=True, bias=True, transposed=True),
    ),
}


def expert(x: Tensor, record: Tensor, shape: ExpertShape, activation: str) -> Tensor:
    parts = [part.double() for part in split_record(record, shape)]
    w_in, w_out = (part.t() if shape.transposed else part for part in parts[:2])
    b_in, b_out = parts[2:] if shape.bias else (None, None)
    h = F.linear(x.double(), w_in, b_in)
    if activation == "SILU":
        gate, up = h.chunk(2, -1)
        a = F.silu(gate) * up
    elif activation == "GELU":
        a = F.gelu(h)
    else:
        gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
        a = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return F.linear(a, w_out, b_out)


@every_device
@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "ids",
    [[[1, 4, 0]], [[0, 3], [3, 3]], [[1, None], [None, None]], [[None]]],
    ids=["three experts", "several rows", "some absent", "all absent"],
)
def test_the_experts_of_a_token_that_are_on_the_device_are_summed(
    kernels: Any, layout: str, ids: list[list[int | None]], dtype: torch.dtype, device: str
) -> None:
    activation, shape = LAYOUTS[layout]
    records = random(5, shape.numel, dtype=dtype, device=device) * 0.5
    base = torch.empty(8, dtype=dtype, device=device)
    distance = (records.data_ptr() - base.data_ptr()) // base.element_size()
    offsets = torch.tensor(
        [[ABSENT if i is None else distance + i * shape.numel for i in row] for row in ids],
        device=device,
    )
    x = random(len(ids), shape.d_model, dtype=dtype, device=device)
    weights = torch.rand(offsets.shape, device=device)
    kind = getattr(kernels, activation)
    options = shape.d_hidden, kind, shape.bias, shape.transposed
    out = kernels.experts(x, weights, offsets, base, *options)
    expected = torch.zeros(x.shape, dtype=torch.float64, device=device)
    for row, (own, share) in enumerate(zip(ids, weights.double(), strict=True)):
        for i, weight in zip(own, share, strict=True):
            if i is not None:
                expected[row] += weight * expert(x[row], records[i], shape, activation)
    assert out.dtype is FP32
    assert_near(out, expected, dtype, roundings=3)  # gate, up and their product


@every_device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_can_be_larger_than_a_tile(
    kernels: Any, layout: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "EXPERT_IN_TILE", kernels.Tile(8, 16, 4))
    monkeypatch.setattr(kernels, "EXPERT_OUT_TILE", kernels.Tile(16, 8, 4))
    activation, small = LAYOUTS[layout]
    shape = dataclasses.replace(small, d_model=40, d_hidden=36)
    record = random(shape.numel, device=device) * 0.5
    x = random(1, shape.d_model, device=device)
    one, zero = torch.ones(1, 1, device=device), torch.zeros(1, 1, dtype=torch.int64)
    options = shape.d_hidden, getattr(kernels, activation), shape.bias, shape.transposed
    out = kernels.experts(x, one, zero.to(device), record, *options)
    assert_near(out, expert(x, record, shape, activation), FP32)


@pytest.mark.parametrize("capability", ["86", "90"])
def test_kernels_compile(capability: str) -> None:
    """Without the interpreter, which accepts code that the compiler rejects."""
    script = Path(__file__).with_name("compile_decode.py")
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(script), capability]
    subprocess.run(command, env=environment, check=True, timeout=100, stdout=subprocess.DEVNULL)
