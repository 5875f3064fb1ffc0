"""The thread that computes missing experts; a Python function takes the place of the GPU."""

import itertools
import math
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overspill.compute.activation import Activation, Differentiated, Fused, clamped_gate
from overspill.compute.activation_form import Function
from overspill.compute.misses import MissRunner
from overspill.compute.record_format import MixedFormat, RecordFormat
from overspill.core.errors import ConfigError, EngineError
from overspill.core.experts import ExpertShape
from overspill.tiers.layout import NO_LOW_RANKS, LowRanks, RecordLayout
from overspill.tiers.worker_sync import WorkerSync
from overspill.transfer.driver import await_signal, signal
from overspill.transfer.mapped import on_device
from tests.compute.adapted import ONE_RANK, RANKS, adapted, low_rank_sum
from tests.compute.groups import BF16, FP32, TOLERANCE, every_dtype, needs_native
from tests.compute.packed import Packed, make_experts
from tests.pairs import all_pairs
from tests.waiting import wait_until

pytestmark = needs_native
LAYERS, EXPERTS, ROWS, TOP_K = 3, 6, 12, 3
SHAPE = ExpertShape(64, 96, gated=True)
Pairs = list[tuple[int, int, float]]  # (row, expert, weight)
_lock = threading.Lock()


def fence() -> None:
    """Orders the accesses before it and after it, as a GPU's fence does."""
    for _ in range(2):
        with _lock:
            pass


class Model:
    """Records of all layers, a runner, and what a GPU does with it."""

    scale = 1.0
    """Scale of token rows."""

    def __init__(
        self,
        shape: ExpertShape = SHAPE,
        dtype: torch.dtype = FP32,
        threads: int = 2,
        inject: Callable[[str], object] | None = None,
        sync: WorkerSync | None = None,
        pinned: bool = False,
        activation: Activation | None = None,
        packed: Sequence[Packed] = (),
        ranks: LowRanks = NO_LOW_RANKS,
    ) -> None:
        """`packed` are the experts of each layer, if they are packed; `ranks` are those of low-rank
        matrices behind their weights."""
        generator = torch.Generator().manual_seed(0)
        records = 0.1 * torch.randn(LAYERS, EXPERTS, shape.numel, generator=generator)
        self.shape, self.dtype, self.records = shape, dtype, records.to(dtype)
        self.stored: Sequence[Tensor] = self.records
        if packed:
            self.records = torch.stack([layer.plain for layer in packed])
            self.stored = [layer.records for layer in packed]
        format = MixedFormat(tuple(layer.format for layer in packed)) if packed else None
        self.layout = RecordLayout(shape, dtype, format=format, ranks=ranks)
        if any(ranks):
            pairs = zip(self.stored, self.records, strict=True)
            self.stored = [adapted(self.layout, *each) for each in pairs]
        self.activation = activation or Fused(shape.gated)
        sizes = LAYERS, EXPERTS, ROWS, TOP_K
        others = pinned, inject, sync, self.activation, None, format, ranks
        self.runner = MissRunner(shape, dtype, *sizes, threads, *others)
        self.buffers = self.runner.host
        for layer, layer_records in enumerate(self.stored):
            self.runner.set_records(layer, [record.data_ptr() for record in layer_records])

    def send(self, layer: int, x: Tensor, pairs: Pairs) -> None:
        buffers = self.buffers
        buffers.x_RD[: len(x)] = x
        buffers.out_RD.fill_(torch.nan)
        buffers.n_rows.fill_(len(x))
        buffers.count.fill_(len(pairs))
        for i, (row, expert, weight) in enumerate(pairs):
            buffers.rows_P[i], buffers.experts_P[i], buffers.weights_P[i] = row, expert, weight
        fence()
        buffers.ready_L[layer] = 1

    def await_done(self, layer: int) -> None:
        until = time.monotonic() + 60
        while int(self.buffers.done_L[layer]) != 1:
            assert time.monotonic() < until, "the GPU would hang"
            time.sleep(1e-6)
        fence()
        assert not self.buffers.ready_L.any()
        self.buffers.done_L[layer] = 0

    def compute(self, layer: int, x: Tensor, pairs: Pairs) -> Tensor:
        self.send(layer, x, pairs)
        self.await_done(layer)
        out = self.buffers.out_RD
        assert out[len(x) :].isnan().all(), "rows that are not in the batch were written"
        return out[: len(x)].clone()

    def expected(self, layer: int, x: Tensor, pairs: Pairs) -> Tensor:
        """Compute in float64, rounded to the type of the weights where the kernels round."""
        shape = self.shape
        total = torch.zeros(x.shape, dtype=torch.float64)
        for row, expert, weight in pairs:
            record = self.records[layer, expert].double()
            parts = record.split([math.prod(size) for size in shape.sizes])
            w_in, w_out, *biases = (p.view(s) for p, s in zip(parts, shape.sizes, strict=True))
            if shape.transposed:
                w_in, w_out = w_in.T, w_out.T
            b_in, b_out = biases or (None, None)
            own = self.layout, self.stored[layer], expert
            x_1D = x[row : row + 1]
            h = F.linear(x_1D.double(), w_in, b_in) + low_rank_sum(*own, 0, x_1D)
            a = self.activation.forward(h.to(x.dtype).double()).to(x.dtype).double()
            y = F.linear(a, w_out, b_out) + low_rank_sum(*own, 1, a)
            total[row] += weight * y.to(x.dtype).double()[0]
        return total

    def assert_near(self, got: Tensor, layer: int, x: Tensor, pairs: Pairs) -> None:
        expected = self.expected(layer, x, pairs)
        largest = max(1e-3, float(expected.abs().max()))
        error = float((got - expected).abs().max())  # NaN if a row was not written
        assert error <= TOLERANCE[x.dtype] * largest

    def check(self, layer: int, x: Tensor, pairs: Pairs) -> None:
        got = self.compute(layer, x, pairs)
        assert got.dtype == FP32
        self.assert_near(got, layer, x, pairs)
        hit = {row for row, _, _ in pairs}
        for row in set(range(len(x))) - hit:
            assert not got[row].any()

    def batch(self, rows: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = self.scale * torch.randn(rows, self.shape.d_model, generator=generator)
        return x.to(self.dtype)


@pytest.fixture
def models() -> Iterator[Callable[..., Model]]:
    """Makes models and closes their runners. Awake unless `awake` is False."""
    made: list[Model] = []

    def make(*args: object, awake: bool = True, **settings: object) -> Model:
        model = Model(*args, **settings)  # type: ignore[arg-type]
        made.append(model)
        if awake:
            model.runner.resume()
        return model

    yield make
    for model in made:
        model.runner.close()


@pytest.fixture
def model(models: Callable[..., Model]) -> Model:
    return models()


ONE_ROW: Pairs = [(0, 4, 0.5), (0, 1, 0.25), (0, 2, -1.5)]
CASES: dict[str, tuple[int, Pairs]] = {
    "one row, one expert": (1, [(0, 3, 0.7)]),
    "one row, several experts": (1, ONE_ROW),
    "several rows, one expert each": (3, [(0, 5, 1.0), (1, 0, 0.5), (2, 3, 0.1)]),
    "several rows of one expert": (4, [(3, 2, 0.4), (0, 2, 0.3), (2, 2, 0.2)]),
    "mixed, one row without": (3, [(2, 1, 0.5), (0, 1, 0.25), (2, 0, 1.0), (2, 4, 2.0)]),
    "all rows of all experts": (
        ROWS,
        [
            (row, (row + k) % EXPERTS, 1 / (1 + row + k))
            for k in range(TOP_K)
            for row in range(ROWS)
        ],
    ),
    "the same expert for all": (ROWS, [(row, 0, 0.1 * row) for row in range(ROWS)]),
    "no expert": (2, []),
}


CLAMPED = Differentiated(clamped_gate)
GPT_OSS = ExpertShape(64, 96, gated=True, bias=True, transposed=True)
SHAPES: dict[str, tuple[ExpertShape, Activation]] = {
    "gelu": (ExpertShape(64, 96, gated=False), Fused(False)),
    "gated": (SHAPE, Fused(True)),
    "relu with biases": (ExpertShape(64, 96, gated=False, bias=True), Fused(False, Function.RELU)),
    "gpt_oss": (GPT_OSS, CLAMPED),
}


@pytest.mark.parametrize(
    ("case", "kind", "threads", "dtype"), all_pairs(list(CASES), list(SHAPES), [1, 3], [FP32, BF16])
)
def test_results_equal_the_reference(
    models: Callable[..., Model], case: str, kind: str, threads: int, dtype: torch.dtype
) -> None:
    shape, activation = SHAPES[kind]
    model = models(shape, dtype, threads, activation=activation)
    rows, pairs = CASES[case]
    for layer in range(LAYERS):
        model.check(layer, model.batch(rows, layer), pairs)


@pytest.mark.parametrize(
    ("names", "kind", "dtype"),
    [
        (("mxfp4", "fp8-block", "int4-zeros"), "gated", FP32),
        (("mxfp4", "nvfp4", "mxfp8"), "gated", BF16),
        (("mxfp4-stack",) * LAYERS, "gpt_oss", BF16),
    ],
)
def test_packed_experts_equal_the_reference(
    models: Callable[..., Model], names: tuple[str, ...], kind: str, dtype: torch.dtype
) -> None:
    """Every layer may be packed in another way."""
    torch.manual_seed(0)
    shape, activation = SHAPES[kind]
    split = kind != "gpt_oss"
    layers = [make_experts(name, shape, EXPERTS, split) for name in names]
    model = models(shape, dtype, 3, activation=activation, packed=layers)
    for rows, pairs in CASES.values():
        for layer in range(LAYERS):
            model.check(layer, model.batch(rows, layer), pairs)
    model.runner.check()


@pytest.mark.parametrize(
    ("packing", "kind", "ranks", "dtype"),
    [
        (None, "gated", RANKS, FP32),
        (None, "gated", RANKS, BF16),
        (None, "relu with biases", ONE_RANK, FP32),
        (None, "gpt_oss", RANKS, BF16),
        ("mxfp4", "gated", RANKS, FP32),
        ("fp8-block", "gated", RANKS, FP32),
        ("int4-zeros", "gated", ONE_RANK, BF16),
        ("mxfp4-stack", "gpt_oss", RANKS, BF16),
    ],
)
def test_low_rank_parts_are_added(
    models: Callable[..., Model],
    packing: str | None,
    kind: str,
    ranks: LowRanks,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    shape, activation = SHAPES[kind]
    layers = [make_experts(packing, shape, EXPERTS, kind != "gpt_oss")] * LAYERS if packing else []
    model = models(shape, dtype, 3, activation=activation, packed=layers, ranks=ranks)
    for rows, pairs in CASES.values():
        model.check(1, model.batch(rows, 1), pairs)
    model.runner.check()


def test_records_that_the_kernel_does_not_read_are_refused() -> None:
    packed = make_experts("int8", SHAPE, 1)
    piece = packed.format.pieces[-1]
    plain = RecordFormat(SHAPE, (*packed.format.pieces[:-1], replace(piece, matrix=None)))
    with pytest.raises(ConfigError, match="missing experts: records that are packed in a way"):
        MissRunner(SHAPE, FP32, 1, 1, 1, 1, 1, False, format=plain)


KINDS: list[list[Any]] = [
    [CLAMPED, Fused(True), Fused(False), Fused(False, Function.RELU)],
    [False, True],  # transposed
    [False, True],  # with biases
    [FP32, BF16],
]


@pytest.mark.parametrize(
    ("activation", "transposed", "bias", "dtype", "sizes"),
    [
        *itertools.product(*KINDS, [(37, 29)]),
        *all_pairs(*KINDS, [(1, 1), (8, 600), (270, 5)]),
    ],
)
def test_every_kind_of_expert_equals_the_reference(
    models: Callable[..., Model],
    activation: Activation,
    transposed: bool,
    bias: bool,
    dtype: torch.dtype,
    sizes: tuple[int, int],
) -> None:
    gated = not isinstance(activation, Fused) or activation.form.gated
    model = models(ExpertShape(*sizes, gated, bias, transposed), dtype, activation=activation)
    for rows, pairs in CASES.values():
        model.check(1, model.batch(rows), pairs)


@every_dtype
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_large_values_are_clamped(
    models: Callable[..., Model], transposed: bool, dtype: torch.dtype
) -> None:
    shape = ExpertShape(64, 96, gated=True, bias=True, transposed=transposed)
    model = models(shape, dtype, activation=CLAMPED)
    model.scale = 100.0
    model.check(0, model.batch(3), [(0, 1, 1.0), (2, 1, 0.5), (2, 3, 2.0)])
    x = model.batch(2)
    x[1, 0] = torch.nan
    got = model.compute(0, x, [(0, 1, 1.0), (1, 1, 1.0)])
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


@every_dtype
def test_an_expert_does_not_depend_on_threads_rows_or_other_experts(
    models: Callable[..., Model], dtype: torch.dtype
) -> None:
    shape = ExpertShape(300, 700, gated=True, bias=True, transposed=True)
    found = []
    for threads in (1, 4):
        model = models(shape, dtype, threads, activation=CLAMPED)
        for rows, pairs in CASES.values():
            others = [pair for pair in pairs if pair[0] > 0]
            got = model.compute(0, model.batch(ROWS)[:rows], [(0, 4, 0.5), *others])
            found.append(got[0])
    assert all(torch.equal(each, found[0]) for each in found)


def test_layers_may_come_in_any_order_with_layers_without_misses_between(model: Model) -> None:
    for layer in (0, 2, 1, 1, 0, 2, 2, 0, 1):
        model.check(layer, model.batch(1, layer), ONE_ROW)
    model.runner.check()


def test_thousands_of_requests_are_answered(models: Callable[..., Model]) -> None:
    model = models(ExpertShape(16, 16, gated=True))
    chance, x = random.Random(0), model.batch(2)
    pairs = [(1, 3, 0.5), (0, 3, 1.0)]
    expected = [model.compute(layer, x, pairs) for layer in range(LAYERS)]
    model.send(0, x, pairs)
    model.await_done(0)
    for number in range(3000):
        layer = chance.randrange(LAYERS)
        model.buffers.out_RD.fill_(torch.nan)
        fence()
        model.buffers.ready_L[layer] = 1
        if number % 500 == 0:
            time.sleep(0.004)  # the thread naps after 2 ms
        model.await_done(layer)
        assert torch.equal(model.buffers.out_RD[:2], expected[layer])
    model.runner.close()
    assert model.runner.n_misses == 3000 + LAYERS + 1


@pytest.mark.parametrize("seconds", [0, 1e-4, 0.003, 0.012])
def test_requests_are_answered_after_pauses(model: Model, seconds: float) -> None:
    """Also those that come while the runner is paused: the GPU would hang."""
    x = model.batch(1)
    for _ in range(4):
        model.check(0, x, ONE_ROW)
        model.runner.pause()
        time.sleep(seconds)
        model.check(1, x, ONE_ROW)
        model.runner.resume()
        time.sleep(seconds)
        model.check(2, x, ONE_ROW)


def test_a_runner_is_paused_at_first_and_uses_no_cpu_time(models: Callable[..., Model]) -> None:
    for model in (models(awake=False), models()):
        model.runner.pause()
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before < 0.05
        model.check(0, model.batch(1), ONE_ROW)


def test_a_failure_in_inject_completes_the_request_and_is_raised_once(
    models: Callable[..., Model],
) -> None:
    failures = iter([RuntimeError("injected")])

    def inject(where: str) -> None:
        assert where == "cpu"
        for failure in failures:
            raise failure

    model = models(inject=inject)
    model.check(0, model.batch(2), [(0, 1, 1.0), (1, 2, 1.0)])
    with pytest.raises(RuntimeError, match="injected"):
        model.runner.check()
    model.runner.check()
    model.check(1, model.batch(1), ONE_ROW)
    model.runner.check()


def test_delayed_threads_neither_read_nor_write_after_done(models: Callable[..., Model]) -> None:
    chance = random.Random(0)
    model = models(threads=4, inject=lambda _: time.sleep(chance.choice((0.0, 0.0, 1e-4, 1e-3))))
    for seed in range(3):
        for rows, pairs in CASES.values():
            model.check(seed, model.batch(rows, seed), pairs)
            model.buffers.x_RD.fill_(torch.nan)
            model.buffers.out_RD.zero_()
            model.buffers.count.fill_(-1)
    model.runner.close()
    assert not model.buffers.out_RD.any(), "written after done"


def test_a_missing_record_gives_zeros_and_is_raised_once(model: Model) -> None:
    addresses = [record.data_ptr() for record in model.records[1]]
    model.runner.set_records(1, [*addresses[:2], 0, *addresses[3:]])
    model.send(1, model.batch(2), [(0, 1, 1.0), (1, 2, 1.0)])
    model.await_done(1)
    assert not model.buffers.out_RD.any()
    with pytest.raises(EngineError, match=r"layer 1: expert 2 is not in host memory.* report"):
        model.runner.check()
    model.runner.check()
    model.check(1, model.batch(1), [(0, 1, 1.0)])
    model.runner.set_records(1, addresses)
    model.check(1, model.batch(1), [(0, 2, 1.0)])
    model.runner.check()


def change(model: Model, name: str, value: int) -> None:
    getattr(model.buffers, name)[0] = value
    fence()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n_rows", ROWS + 1, "13 token rows, at most 12"),
        ("n_rows", -1, "-1 token rows"),
        ("count", 2 * TOP_K + 1, "7 experts of 2 token rows"),
        ("count", -1, "-1 experts of"),
        ("rows_P", 2, "no token row 2"),
        ("rows_P", -1, "no token row -1"),
        ("experts_P", EXPERTS, "no expert 6"),
    ],
)
def test_an_invalid_request_gives_zeros_and_is_raised(
    model: Model, name: str, value: int, message: str
) -> None:
    x, pairs = model.batch(2), [(1, 3, 1.0)]
    model.check(0, x, pairs)
    model.buffers.out_RD.fill_(torch.nan)
    change(model, name, value)
    model.buffers.ready_L[2] = 1
    model.await_done(2)
    assert not model.buffers.out_RD.any()
    with pytest.raises(EngineError, match=f"layer 2: .*{message}"):
        model.runner.check()
    model.check(2, x, pairs)
    model.runner.check()


def test_check_raises_the_failure_of_another_worker_thread(models: Callable[..., Model]) -> None:
    sync = WorkerSync()
    model = models(sync=sync)
    model.runner.check()
    sync.fail(OSError("no disk"))
    with pytest.raises(EngineError, match="no disk"):
        model.runner.check()


@pytest.mark.parametrize("awake", [True, False])
@pytest.mark.parametrize("seconds", [0, 0.004])
def test_close_ends_an_idle_runner(
    models: Callable[..., Model], awake: bool, seconds: float
) -> None:
    model = models(awake=awake)
    time.sleep(seconds)
    model.runner.close()
    model.runner.close()
    model.runner.pause()
    model.runner.check()
    with pytest.raises(EngineError, match="closed"):
        model.runner.resume()
    with pytest.raises(EngineError, match="closed"):
        model.runner.set_records(0, [0] * EXPERTS)


def test_close_finishes_the_request_that_is_being_computed(models: Callable[..., Model]) -> None:
    started = threading.Event()

    def inject(_: str) -> None:
        started.set()
        time.sleep(0.002)

    model, pairs = models(inject=inject), ONE_ROW
    x = model.batch(1)
    model.send(0, x, pairs)
    assert started.wait(60)
    model.runner.close()
    assert int(model.buffers.done_L[0]) == 1
    model.assert_near(model.buffers.out_RD[:1], 0, x, pairs)


@pytest.mark.parametrize("awake", [False, True])
def test_close_finishes_a_request_that_has_not_started(
    awake: bool, models: Callable[..., Model]
) -> None:
    """Also if the thread looks for requests, and whether it ends, just before: often enough that
    one of these runs hits that moment."""
    for _ in range(40):
        model = models(awake=awake)
        model.send(1, model.batch(1), ONE_ROW)
        model.runner.close()
        assert int(model.buffers.done_L[1]) == 1


def test_a_runner_without_references_ends_its_threads() -> None:
    def count_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    calls: list[str] = []
    model = Model(threads=2, inject=calls.append)
    model.runner.resume()
    model.check(0, model.batch(1), ONE_ROW)
    assert calls
    before = count_threads()
    del model
    # the system lists a thread for a moment after it was joined
    wait_until(lambda: count_threads() <= before - 2)


def test_hinted_experts_are_loaded_and_results_stay_the_same(model: Model) -> None:
    buffers = model.buffers
    x, pairs = model.batch(2), [(0, 4, 0.5), (1, 2, 2.0), (1, 4, 1.0)]
    for layer in (0, 1, 2, 1):
        expected = model.runner.n_loaded + 2
        hinted = [layer * EXPERTS + expert for expert in (4, -1, 2, 4)]
        for i, number in enumerate(hinted):
            buffers.ahead_N[i] = number
        fence()
        buffers.ahead_count.fill_(4)
        wait_until(lambda: model.runner.n_loaded >= expected)  # noqa: B023
        assert not int(buffers.ahead_count)
        model.check(layer, x, pairs)


def test_hints_that_come_at_any_time_change_nothing(model: Model) -> None:
    """They may be of other layers, incomplete, or no experts at all."""
    random_numbers, buffers = random.Random(0), model.buffers
    for number in range(200):
        for i in range(len(buffers.ahead_N)):
            buffers.ahead_N[i] = random_numbers.randrange(-3, LAYERS * EXPERTS + 3)
        buffers.ahead_count.fill_(random_numbers.choice([1, 5, 1 << 30, -1]))
        model.check(number % LAYERS, model.batch(1, number), [(0, number % EXPERTS, 1.0)])
    model.runner.check()


def test_two_runners_compute_at_once(models: Callable[..., Model]) -> None:
    both = models(), models(dtype=BF16, threads=3)
    x = [model.batch(2) for model in both]
    pairs = [(0, 1, 1.0), (1, 2, 0.5), (1, 5, 0.5)]
    expected = [model.compute(0, rows, pairs) for model, rows in zip(both, x, strict=True)]
    for _ in range(50):
        for model, rows in zip(both, x, strict=True):
            model.send(0, rows, pairs)
        for model, rows in zip(both, expected, strict=True):
            model.await_done(0)
            assert torch.equal(model.buffers.out_RD[:2], rows)


def test_counters_and_spans_describe_the_requests(model: Model) -> None:
    began = time.perf_counter_ns()
    requests = [(0, 1, ONE_ROW, 3), (2, 2, [(0, 1, 1.0), (1, 1, 1.0)], 1), (1, 1, [], 0)]
    for layer, rows, pairs, _ in requests:
        model.check(layer, model.batch(rows), pairs)
    model.runner.close()
    spans = model.runner.take_spans()
    assert [(span.layer, span.n_experts) for span in spans] == [
        (layer, n_experts) for layer, _, _, n_experts in requests
    ]
    times = [time for span in spans for time in (span.begin, span.end)]
    assert times == sorted(times)
    assert began <= times[0] <= times[-1] <= time.perf_counter_ns()
    assert model.runner.n_misses == 4
    assert model.runner.seconds == sum(span.end - span.begin for span in spans) / 1e9
    assert model.runner.take_spans() == []


def test_the_latest_spans_are_kept(models: Callable[..., Model]) -> None:
    model = models(ExpertShape(8, 8, gated=False), threads=1)
    model.compute(1, model.batch(1), [])
    for number in range(4100):
        layer = 0 if number < 10 else 2
        model.buffers.ready_L[layer] = 1
        model.await_done(layer)
    model.runner.close()
    spans = model.runner.take_spans()
    assert len(spans) == 4096
    assert [span.layer for span in spans] == [0] * 6 + [2] * 4090
    assert [span.begin for span in spans] == sorted(span.begin for span in spans)


@pytest.mark.parametrize(
    ("shape", "dtype", "function", "reason"),
    [
        (ExpertShape(8, 8, True), torch.float16, None, "float16"),
        (ExpertShape(8, 8, False), FP32, torch.tanh, "the activation tanh, .* of GPT-OSS"),
        (GPT_OSS, FP32, lambda h: clamped_gate(h.clamp(max=6.0)), "the activation <lambda>"),
        (GPT_OSS, FP32, lambda h: clamped_gate(h.flip(-1)), "the activation <lambda>"),
    ],
)
def test_other_experts_are_refused(
    shape: ExpertShape,
    dtype: torch.dtype,
    function: Callable[[Tensor], Tensor] | None,
    reason: str,
) -> None:
    activation = None if function is None else Differentiated(function)
    with pytest.raises(ConfigError, match=f"missing experts: .*{reason}"):
        MissRunner(shape, dtype, 1, 1, 1, 1, 1, False, activation=activation)


def test_a_wrong_number_of_addresses_is_refused(model: Model) -> None:
    for layer, count in ((0, EXPERTS - 1), (LAYERS, EXPERTS), (-1, EXPERTS)):
        with pytest.raises(ValueError, match="3 layers of 6 experts"):
            model.runner.set_records(layer, [0] * count)


def test_every_buffer_begins_at_a_cache_line(model: Model) -> None:
    addresses = [tensor.data_ptr() for tensor in vars(model.buffers).values()]
    assert all(address % 64 == 0 for address in addresses)
    assert len({address // 64 for address in addresses}) == len(addresses)


def test_a_forked_child_computes_with_a_runner_of_its_own(model: Model) -> None:
    x = model.batch(1)
    model.check(0, x, ONE_ROW)

    def child() -> None:
        for call in (model.runner.resume, model.runner.check, model.runner.take_spans):
            try:
                call()
            except EngineError:
                continue
            os._exit(2)
        model.runner.close()
        own = Model()
        own.runner.resume()
        own.check(0, x, ONE_ROW)
        own.runner.close()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 0, "it hangs" if code is None else f"exit code {code}"
    model.check(1, x, ONE_ROW)


@pytest.mark.gpu
@every_dtype
def test_a_cuda_graph_gets_its_missing_experts(dtype: torch.dtype) -> None:
    """Torch's kernels write the request; stream memory operations stand for those of the router."""
    device = torch.device("cuda")
    model = Model(dtype=dtype, pinned=True)
    device_side = model.runner.view(on_device(model.runner.memory, device))
    requests = [(0, ONE_ROW), (2, [(0, 5, 0.25)]), (1, [(1, 2, 0.5), (0, 2, 1.5), (1, 0, 1.0)])]
    x = torch.zeros(2, SHAPE.d_model, dtype=dtype, device=device)
    results = torch.zeros(len(requests), *x.shape, device=device)
    graph = torch.cuda.CUDAGraph()
    types = torch.int32, torch.int32, FP32
    columns = [
        [torch.tensor([pair[i] for pair in pairs], dtype=types[i], device=device) for i in range(3)]
        for _, pairs in requests
    ]

    def write(source: Tensor, to: Tensor) -> None:
        """With a kernel: a copy between pinned memory and the device is not one."""
        torch.mul(source, 1, out=to)

    def step() -> None:
        stream = torch.cuda.current_stream()
        for (layer, pairs), column, result in zip(requests, columns, results, strict=True):
            count = len(pairs)
            write(x, device_side.x_RD[:2])
            device_side.n_rows.fill_(2)
            device_side.count.fill_(count)
            write(column[0], device_side.rows_P[:count])
            write(column[1], device_side.experts_P[:count])
            write(column[2], device_side.weights_P[:count])
            signal(stream, model.buffers.ready_L[layer].data_ptr(), 1)
            await_signal(stream, model.buffers.done_L[layer].data_ptr(), 1)
            write(device_side.out_RD[:2], result)
            signal(stream, model.buffers.done_L[layer].data_ptr(), 0)

    step()  # loads the kernels, which a capture may not do
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    for seed in range(20):
        if seed % 7 == 6:
            model.runner.pause()
            time.sleep(0.005)
        model.runner.resume()
        batch = model.batch(2, seed)
        x.copy_(batch)
        graph.replay()
        torch.cuda.synchronize()
        model.runner.check()
        for (layer, pairs), result in zip(requests, results.cpu(), strict=True):
            model.assert_near(result, layer, batch, pairs)
    model.runner.close()
    assert model.runner.n_misses == 21 * 6
