"""Who computes which experts of a group: the kernel, or torch where that is faster or alone can."""

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from overspill.compute import cpu, cpu_kernel
from overspill.compute.activation import Activation, Differentiated, Fused
from overspill.compute.cpu_kernel import cpu_kernel_name, read_bandwidth
from overspill.core.experts import ExpertShape
from tests.compute.groups import (
    FP32,
    TOLERANCE,
    Group,
    by_waves,
    compute,
    every_dtype,
    gated_or_not,
    needs_native,
)


@needs_native
@every_dtype
def test_many_rows_go_to_torch_and_agree(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group.make(ExpertShape(32, 64, True), (10, 30), dtype)
    native = compute(group)
    calls = spy(monkeypatch, "wave_forward")
    monkeypatch.setattr(cpu, "most_rows", lambda *_: 16)
    mixed = compute(group)
    assert calls == [30]
    mixed.assert_near(native, TOLERANCE[dtype])
    assert mixed.squares == pytest.approx(native.squares, rel=2e-2)
    assert torch.equal(mixed.y[:10], native.y[:10])


def spy(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The numbers of rows that `cpu` hands to torch."""
    rows: list[int] = []
    real: Callable[..., object] = getattr(cpu, name)

    def call(x: Tensor, *args: object) -> object:
        rows.append(len(x))
        return real(x, *args)

    monkeypatch.setattr(cpu, name, call)
    return rows


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log, as if nothing had been said before."""
    cpu._say_torch.cache_clear()
    with caplog.at_level(logging.INFO, logger="overspill"):
        yield caplog
    cpu._say_torch.cache_clear()


FALLBACKS: dict[str, tuple[ExpertShape, Activation | None, str]] = {
    "bias": (ExpertShape(16, 32, True, bias=True), None, "biases"),
    "transposed": (ExpertShape(16, 32, True, transposed=True), None, "transposed"),
    "activation": (
        ExpertShape(16, 32, False),
        Differentiated(lambda h: h.relu().square()),
        "activations",
    ),
}


@needs_native
@pytest.mark.parametrize("kind", FALLBACKS)
def test_what_the_kernel_does_not_do_goes_to_torch_and_is_said_once(
    kind: str, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, activation, word = FALLBACKS[kind]
    group = Group.make(shape, (3, 0, 9))
    calls = spy(monkeypatch, "wave_forward")
    results = compute(group, activation=activation)
    compute(group, activation=activation)
    results.assert_near(by_waves(group.wide(), activation=activation), TOLERANCE[FP32])
    assert calls == [3, 0, 9] * 2
    assert [word in record.message for record in said.records] == [True]


@needs_native
def test_float64_goes_to_torch(said: pytest.LogCaptureFixture) -> None:
    group = Group.make(ExpertShape(16, 32, True), (3,)).wide()
    compute(group).assert_near(by_waves(group), 1e-12)
    assert "float64" in said.text


@needs_native
@gated_or_not
def test_fused_activation_is_what_the_kernel_computes(
    gated: bool, said: pytest.LogCaptureFixture
) -> None:
    group = Group.make(ExpertShape(16, 32, gated), (3,))
    compute(group, activation=Fused(gated)).assert_equal(compute(group))
    assert not said.records


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernel, "cpu_library", lambda: None)
    group = Group.make(ExpertShape(16, 32, True), (3, 0, 9))
    results = compute(group)
    results.assert_near(by_waves(group.wide()), TOLERANCE[FP32])
    for square, gradient in zip(results.squares, results.gradients, strict=True):
        assert square == pytest.approx(float(gradient.square().sum()), rel=1e-5)
    assert cpu_kernel_name() == "torch"
    assert read_bandwidth(torch.ones(1000), threads=1) > 0


def test_frozen_backward_returns_no_squares() -> None:
    assert compute(Group.make(ExpertShape(16, 32, True), (3,)), frozen=True).squares == []


def test_a_group_without_experts_does_nothing() -> None:
    assert compute(Group.make(ExpertShape(16, 32, True), ())).squares == []
