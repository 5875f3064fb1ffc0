"""The AdamW update compared with torch.optim.AdamW, on every path of this machine."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from overspill.hardware import native
from overspill.optim import kernel
from overspill.optim.arguments import AdamHyper, RecordState
from overspill.optim.kernel import (
    ISA_NAMES,
    accumulate_,
    adamw_,
    adamw_torch_,
    join_master,
    kernel_name,
    split_master_,
)

BF16, FP32 = torch.bfloat16, torch.float32
HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
SIZES = (1, 15, 16, 17, 31, 1000, 65535, 65537, 200_003)
KINDS = [(weight, moments) for weight in (FP32, BF16) for moments in (FP32, BF16)]

needs_native = pytest.mark.skipif(kernel_name() == "torch", reason="no C++ compiler")


def _isas() -> list[int]:
    return list(range(ISA_NAMES.index(kernel_name()) + 1)) if kernel_name() != "torch" else []


def _state(master: Tensor, weight: torch.dtype, moments: torch.dtype) -> RecordState:
    exp_avg = torch.zeros_like(master, dtype=moments)
    if weight == FP32:
        return RecordState(master.clone(), None, exp_avg, exp_avg.clone())
    rounded = torch.empty_like(master, dtype=BF16)
    low = torch.empty_like(master, dtype=torch.int16)
    split_master_(master, rounded, low)
    return RecordState(rounded, low, exp_avg, exp_avg.clone())


def _master(state: RecordState) -> Tensor:
    return state.weight if state.low is None else join_master(state.weight, state.low)


def _random(numel: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def _grads(numel: int, steps: int, dtype: torch.dtype) -> list[Tensor]:
    return [_random(numel, seed=100 + step, scale=1e-2).to(dtype) for step in range(steps)]


def _copy(state: RecordState) -> RecordState:
    return RecordState(*(None if part is None else part.clone() for part in state))  # type: ignore[arg-type]


def _train(
    state: RecordState,
    grads: list[Tensor] | list[None],
    hyper: AdamHyper = HYPER,
    threads: int = 1,
    isa: int = -1,
) -> RecordState:
    for step, grad in enumerate(grads, start=1):
        adamw_(state, grad, replace(hyper, step=step), threads, isa)
    return state


def _train_torch(master: Tensor, grads: list[Tensor], hyper: AdamHyper = HYPER) -> RecordState:
    """The oracle: plain, unfused torch.optim.AdamW on an fp32 parameter."""
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=hyper.lr,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        foreach=False,
    )
    for grad in grads:
        parameter.grad = grad.float() * hyper.grad_scale
        optimizer.step()
    moments = optimizer.state[parameter]
    return RecordState(parameter.detach(), None, moments["exp_avg"], moments["exp_avg_sq"])


def _assert_near(actual: Tensor, expected: Tensor, relative: float) -> None:
    """Relative to the largest value, because elements near zero are differences of larger ones."""
    error = (actual.float() - expected.float()).abs().max()
    assert error <= relative * expected.abs().max()


def _assert_same_bits(one: RecordState, other: RecordState) -> None:
    for mine, theirs in zip(one, other, strict=True):
        if mine is not None and theirs is not None:
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("weight", [FP32, BF16])
def test_twenty_steps_equal_torch_adamw(weight: torch.dtype) -> None:
    master = _random(4099)
    grads = _grads(4099, 20, weight)
    state = _train(_state(master, weight, FP32), grads)
    expected = _train_torch(master, grads)
    _assert_near(_master(state), expected.weight, 1e-6)
    _assert_near(state.exp_avg, expected.exp_avg, 1e-6)
    _assert_near(state.exp_avg_sq, expected.exp_avg_sq, 1e-6)


def test_bf16_weight_is_its_master_rounded() -> None:
    state = _train(_state(_random(4099), BF16, FP32), _grads(4099, 20, BF16))
    assert torch.equal(state.weight, _master(state).to(BF16))


def test_the_master_accumulates_updates_below_a_bf16_ulp() -> None:
    hyper = replace(HYPER, lr=1e-5, weight_decay=0.0)  # a bf16 ulp at 1 is 8e-3
    state = _state(torch.ones(64), BF16, FP32)
    grads = [torch.ones(64, dtype=BF16)] * 50
    _train(state, grads, hyper)
    assert torch.equal(state.weight, torch.ones(64, dtype=BF16))
    _assert_near(_master(state), torch.full((64,), 1 - 50e-5), 1e-6)


@pytest.mark.parametrize("weight", [FP32, BF16])
def test_no_gradient_is_a_gradient_of_zero(weight: torch.dtype) -> None:
    grads = _grads(1000, 3, weight)
    one = _train(_state(_random(1000), weight, FP32), grads)
    other = _copy(one)
    adamw_(one, None, replace(HYPER, step=4))
    adamw_(other, torch.zeros(1000, dtype=weight), replace(HYPER, step=4))
    _assert_same_bits(one, other)
    expected = _train_torch(_random(1000), [*grads, torch.zeros(1000)])
    _assert_near(_master(one), expected.weight, 1e-6)


@pytest.mark.parametrize("weight", [FP32, BF16])
def test_grad_scale_multiplies_the_gradient(weight: torch.dtype) -> None:
    hyper = replace(HYPER, grad_scale=0.037, eps=1e-3)  # a small eps would hide the scale
    grads = _grads(1000, 5, weight)
    state = _train(_state(_random(1000), weight, FP32), grads, hyper)
    expected = _train_torch(_random(1000), grads, hyper)
    _assert_near(_master(state), expected.weight, 1e-6)
    unscaled = _train_torch(_random(1000), grads, replace(hyper, grad_scale=1.0))
    assert (unscaled.weight - expected.weight).abs().max() > 1e-3


@pytest.mark.parametrize("numel", SIZES)
def test_any_size_changes_only_its_own_elements(numel: int) -> None:
    guard = 64
    wide = _state(_random(numel + 2 * guard), BF16, FP32)
    before = _copy(wide)
    middle = slice(guard - 1, guard - 1 + numel)  # also unaligned
    state = RecordState(*(None if part is None else part[middle] for part in wide))  # type: ignore[arg-type]
    master = _master(state).clone()
    grad = _random(numel, seed=1).to(BF16)
    adamw_(state, grad, HYPER, threads=2)
    _assert_near(_master(state), _train_torch(master, [grad]).weight, 1e-6)
    for now, then in zip(wide, before, strict=True):
        assert now is not None
        assert then is not None
        assert torch.equal(now[: guard - 1], then[: guard - 1])
        assert torch.equal(now[guard - 1 + numel :], then[guard - 1 + numel :])


def test_an_empty_record_is_allowed() -> None:
    adamw_(_state(torch.empty(0), BF16, FP32), torch.empty(0, dtype=BF16), HYPER, threads=2)
    assert accumulate_(torch.empty(0), torch.empty(0), threads=2) == 0.0


@pytest.mark.parametrize(("weight", "moments"), KINDS)
@pytest.mark.parametrize("numel", SIZES)
def test_an_update_by_two_gradients_is_that_by_their_sum(
    weight: torch.dtype, moments: torch.dtype, numel: int
) -> None:
    first, second = (grad.to(weight) for grad in _grads(numel, 2, weight))
    one, other = (_state(_random(numel), weight, moments) for _ in range(2))
    adamw_(one, first + second, HYPER, threads=2)
    adamw_(other, first, HYPER, threads=2, added=second)
    _assert_same_bits(one, other)


@needs_native
@pytest.mark.parametrize("isa", _isas()[1:])
@pytest.mark.parametrize(("weight", "moments"), KINDS)
def test_instruction_sets_agree(weight: torch.dtype, moments: torch.dtype, isa: int) -> None:
    grads = _grads(1003, 5, weight)
    plain = _train(_state(_random(1003), weight, moments), grads, isa=0)
    vector = _train(_state(_random(1003), weight, moments), grads, isa=isa)
    _assert_near(_master(vector), _master(plain), 1e-6)
    # A fused multiply-add changes a moment by an fp32 ulp, which rarely changes its rounding.
    tolerance = 1e-6 if moments == FP32 else 2**-7
    _assert_near(vector.exp_avg, plain.exp_avg, tolerance)
    _assert_near(vector.exp_avg_sq, plain.exp_avg_sq, tolerance)
    if moments == BF16:  # with different noise, half of them would differ
        assert (vector.exp_avg == plain.exp_avg).float().mean() > 0.99


@needs_native
@pytest.mark.parametrize(("weight", "moments"), KINDS)
def test_any_number_of_threads_gives_the_same_bits(
    weight: torch.dtype, moments: torch.dtype
) -> None:
    grads = _grads(200_003, 3, weight)
    one = _train(_state(_random(200_003), weight, moments), grads, threads=1)
    for threads in (2, 5):
        other = _train(_state(_random(200_003), weight, moments), grads, threads=threads)
        _assert_same_bits(one, other)


def test_bf16_moments_follow_fp32_ones_and_do_not_freeze() -> None:
    """After a large gradient exp_avg_sq decays by 0.1% per step, a quarter of a bf16 ulp."""
    numel, steps = 512, 3000
    hyper = replace(HYPER, beta2=0.999, weight_decay=0.0)
    large, small = torch.full((numel,), 1.0), torch.full((numel,), 1e-3)
    exact = _state(torch.zeros(numel), FP32, FP32)
    rounded = _state(torch.zeros(numel), FP32, BF16)
    for step in range(1, steps + 1):
        grad = large if step <= 10 else small
        for state in (exact, rounded):
            adamw_(state, grad, replace(hyper, step=step))
    assert exact.exp_avg_sq.max() < 1e-3  # it was 1e-2
    # Rounding is unbiased: elements deviate, the mean over the record does not.
    mean = rounded.exp_avg_sq.float().mean() / exact.exp_avg_sq.mean()
    assert abs(float(mean) - 1) < 0.02
    assert ((rounded.exp_avg_sq.float() / exact.exp_avg_sq - 1).abs() < 0.5).all()
    _assert_near(rounded.exp_avg.float().mean(), exact.exp_avg.mean(), 0.02)
    _assert_near(rounded.weight.mean(), exact.weight.mean(), 0.02)


@needs_native
@pytest.mark.parametrize(("weight", "moments"), KINDS)
@pytest.mark.parametrize("has_grad", [True, False])
def test_torch_fallback_equals_the_kernel(
    weight: torch.dtype, moments: torch.dtype, has_grad: bool
) -> None:
    hyper = replace(HYPER, grad_scale=0.5)
    start = _train(_state(_random(3500), weight, moments), _grads(3500, 2, weight), hyper)
    grad = _grads(3500, 3, weight)[-1] if has_grad else None
    native_state, torch_state = _copy(start), _copy(start)
    adamw_(native_state, grad, replace(hyper, step=3))
    adamw_torch_(torch_state, grad, replace(hyper, step=3), chunk=1000)  # the last is shorter
    _assert_near(_master(torch_state), _master(native_state), 1e-6)
    for mine, theirs in (
        (torch_state.exp_avg, native_state.exp_avg),
        (torch_state.exp_avg_sq, native_state.exp_avg_sq),
    ):
        _assert_near(mine, theirs, 1e-6 if moments == FP32 else 2**-7)
        if moments == BF16:  # the same noise: only differences of an fp32 ulp remain
            assert (mine == theirs).float().mean() > 0.99


def _fallback(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Hides the compiler. Returns a function that unloads cached libraries."""

    def forget() -> None:
        kernel.native_library.cache_clear()
        native.load_library.cache_clear()

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    return forget


def test_without_a_compiler_torch_is_used_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget = _fallback(monkeypatch)
    forget()
    try:
        with caplog.at_level(logging.WARNING, logger="overspill"):
            grads = _grads(100, 3, BF16)
            state = _train(_state(_random(100), BF16, FP32), grads)
            squares = accumulate_(grads[0].clone(), grads[1])
            by_sum, by_two = (_state(_random(100), BF16, FP32) for _ in range(2))
            adamw_(by_sum, grads[0] + grads[1], HYPER)
            adamw_(by_two, grads[0].clone(), HYPER, added=grads[1])
            _assert_same_bits(by_sum, by_two)
        assert kernel_name() == "torch"
        _assert_near(_master(state), _train_torch(_random(100), grads).weight, 1e-6)
        expected = (grads[0] + grads[1]).double().square().sum()
        assert squares == pytest.approx(float(expected), rel=1e-12)
        reason, consequence = (record.message for record in caplog.records)
        assert "'adamw'" in reason
        assert "no C++ compiler" in reason
        assert "torch's fused AdamW" in consequence
    finally:
        forget()  # later tests use the compiler again


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("numel", SIZES)
def test_accumulate_adds_as_torch_does(dtype: torch.dtype, numel: int) -> None:
    into, grad = _random(numel).to(dtype), _random(numel, seed=1, scale=0.1).to(dtype)
    expected = into + grad
    squares = accumulate_(into, grad, threads=2)
    assert torch.equal(into, expected)
    assert squares == pytest.approx(float(expected.double().square().sum()), rel=1e-12)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_accumulate_on_one_or_many_threads_returns_the_same_bits(dtype: torch.dtype) -> None:
    into, grad = _random(200_003).to(dtype), _random(200_003, seed=1).to(dtype)
    assert accumulate_(into.clone(), grad, 1) == accumulate_(into.clone(), grad, 3)


@needs_native
@pytest.mark.parametrize("isa", _isas())
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_accumulate_keeps_nan_and_infinity(dtype: torch.dtype, isa: int) -> None:
    into = torch.ones(50, dtype=dtype)
    grad = torch.ones(50, dtype=dtype)
    grad[7] = torch.inf
    assert accumulate_(into.clone(), grad, isa=isa) == torch.inf
    if dtype == BF16:  # a NaN whose payload is all ones
        grad.view(torch.int16)[7] = 0x7FFF
    else:
        grad[7] = torch.nan
    squares = accumulate_(into, grad, isa=isa)
    assert squares != squares
    assert into[7].isnan()
    assert into.isnan().sum() == 1


# Every finite float, including subnormals and both zeros: exponent bits are not all ones.
finite_bits = st.integers(0, 2**32 - 1).filter(lambda bits: bits >> 23 & 0xFF != 0xFF)


@given(st.lists(finite_bits, min_size=1, max_size=64))
def test_join_is_the_inverse_of_split(patterns: list[int]) -> None:
    signed = [bits - (1 << 32) if bits >= 1 << 31 else bits for bits in patterns]
    master = torch.tensor(signed, dtype=torch.int32).view(FP32)
    weight, low = torch.empty(len(signed), dtype=BF16), torch.empty(len(signed), dtype=torch.int16)
    split_master_(master, weight, low)
    assert torch.equal(join_master(weight, low).view(torch.int32), master.view(torch.int32))
    # Rounded to nearest as in torch, except for ties, which round away from zero here.
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~ties], master.to(BF16)[~ties])


@needs_native
@given(st.lists(finite_bits, min_size=1, max_size=64))
def test_kernel_joins_and_splits_as_python_does(patterns: list[int]) -> None:
    signed = [bits - (1 << 32) if bits >= 1 << 31 else bits for bits in patterns]
    master = torch.tensor(signed, dtype=torch.int32).view(FP32)
    state = _state(master, BF16, FP32)
    for isa in _isas():
        adamw_(state, None, replace(HYPER, lr=0.0), isa=isa)  # no change
        assert torch.equal(_master(state), master)


@needs_native
def test_the_kernel_releases_the_gil() -> None:
    state = _state(torch.zeros(4_000_000), FP32, FP32)
    calls, seen = 0, threading.Event()

    def work() -> None:
        nonlocal calls
        while not seen.is_set() and calls < 1000:
            calls += 1
            _train(state, [None])

    worker = threading.Thread(target=work)
    worker.start()
    ticks = last = 0
    while worker.is_alive() and ticks < 5:
        time.sleep(0.0005)
        ticks, last = (ticks + 1, last) if last == calls else (0, calls)
    seen.set()
    worker.join()
    assert ticks == 5, "with the GIL held, another thread runs before and after each call only"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
class TestOnTheGpu:
    @pytest.mark.parametrize(("weight", "moments"), KINDS)
    @pytest.mark.parametrize("numel", [1, 17, 65537])
    def test_triton_equals_the_cpu_kernel(
        self, weight: torch.dtype, moments: torch.dtype, numel: int
    ) -> None:
        pytest.importorskip("triton")
        hyper = replace(HYPER, grad_scale=0.5)
        host = _state(_random(numel), weight, moments)
        device = _to_gpu(host)
        for step, grad in enumerate([*_grads(numel, 4, weight), None], start=1):
            adamw_(host, grad, replace(hyper, step=step))
            adamw_(device, None if grad is None else grad.cuda(), replace(hyper, step=step))
        _assert_near(_master(device).cpu(), _master(host), 1e-6)
        tolerance = 1e-6 if moments == FP32 else 2**-7
        _assert_near(device.exp_avg.cpu(), host.exp_avg, tolerance)
        _assert_near(device.exp_avg_sq.cpu(), host.exp_avg_sq, tolerance)

    @pytest.mark.parametrize(("weight", "moments"), KINDS)
    def test_torch_operations_equal_triton(self, weight: torch.dtype, moments: torch.dtype) -> None:
        pytest.importorskip("triton")
        with_triton = _to_gpu(_state(_random(5000), weight, moments))
        without = _copy(with_triton)
        grad = _random(5000, seed=1).to(weight).cuda()
        adamw_(with_triton, grad, HYPER)
        adamw_torch_(without, grad, HYPER)
        _assert_near(_master(without), _master(with_triton), 1e-6)
        _assert_near(without.exp_avg_sq, with_triton.exp_avg_sq, 2**-7)

    def test_a_new_step_and_lr_do_not_compile_again(self) -> None:
        pytest.importorskip("triton")
        from overspill.optim import gpu_kernel

        state = _to_gpu(_state(_random(4096), BF16, FP32))
        grad = torch.ones(4096, dtype=BF16, device="cuda")
        adamw_(state, grad, HYPER)
        compiled = _compiled_variants(gpu_kernel.adamw_kernel)
        for step in range(2, 40):  # includes seeds of both signs
            adamw_(state, grad, replace(HYPER, step=step, lr=1.0 / step, grad_scale=1.0 * step))
        assert _compiled_variants(gpu_kernel.adamw_kernel) == compiled

    def test_the_launch_is_asynchronous_on_the_current_stream(self) -> None:
        pytest.importorskip("triton")
        state = _to_gpu(_state(_random(4096), BF16, FP32))
        grad = torch.ones(4096, dtype=BF16, device="cuda")
        adamw_(_copy(state), grad, HYPER)  # compiles
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)  # about half a second
            adamw_(state, grad, HYPER)
        assert not stream.query()
        stream.synchronize()
        assert bool((state.exp_avg != 0).all())

    def test_accumulate_adds_on_the_gpu(self) -> None:
        into, grad = _random(5000).to(BF16).cuda(), _random(5000, seed=1).to(BF16).cuda()
        expected = into + grad
        squares = accumulate_(into, grad)
        assert torch.equal(into, expected)
        assert squares == pytest.approx(float(expected.double().square().sum()), rel=1e-12)


def _to_gpu(state: RecordState) -> RecordState:
    return RecordState(*(None if part is None else part.cuda() for part in state))  # type: ignore[arg-type]


def _compiled_variants(function: object) -> int:
    caches = function.device_caches  # type: ignore[attr-defined]
    return sum(len(cache[0]) for cache in caches.values())
