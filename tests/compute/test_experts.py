"""Waves of experts, forward and backward, compared with autograd through a naive loop."""

import pytest
import torch

from overspill.compute.experts import WaveGrads, wave_backward, wave_forward
from tests.compute.waves import LAYOUTS, N_EXPERTS, Case, by_autograd, by_waves, clamped_gate
from tests.pairs import all_pairs

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.mark.parametrize("kind", ["even", "some without tokens", "all to the same"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_waves_follow_autograd_through_the_naive_loop(
    kind: str, top_k: int, gated: bool, dtype: torch.dtype
) -> None:
    case = Case.make(kind, top_k, gated, dtype)
    tolerance = TOLERANCE[dtype]
    by_waves(case).assert_close(by_autograd(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["even", "some without tokens"])
@pytest.mark.parametrize("keep_hidden", [False, True])
def test_any_layout_follows_autograd(layout: str, kind: str, keep_hidden: bool) -> None:
    case = Case.make(kind, dtype=torch.float64, **LAYOUTS[layout])
    expected = by_autograd(case)
    for borders in ((0, N_EXPERTS), (0, 1, 4, N_EXPERTS)):
        by_waves(case, borders, keep_hidden).assert_close(expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("host_counts", [False, True])
def test_grouped_kernels_take_any_layout(layout: str, host_counts: bool) -> None:
    sizes = {"d_model": 64, "d_hidden": 128, "n_tokens": 333}
    own = LAYOUTS[layout]
    # bf16 and float32 can be on different sides of a clamp
    if own.get("activation") is clamped_gate:
        own = own | {"activation": lambda h: (h[..., 1::2] + 1) * torch.tanh(h[..., ::2])}
    case = Case.make("some without tokens", dtype=torch.bfloat16, device="cuda", **sizes, **own)
    expected = by_autograd(case.wide())
    for borders in ((0, N_EXPERTS), (0, 1, 4, N_EXPERTS)):
        for name, mine in by_waves(case, borders, host_counts=host_counts).named().items():
            theirs = expected.named()[name]
            assert (mine.float() - theirs).abs().max() <= 2e-2 * theirs.abs().max(), name


@pytest.mark.parametrize("gated", [False, True])
def test_bf16_waves_follow_float32_autograd(gated: bool) -> None:
    case = Case.make(gated=gated, dtype=torch.bfloat16)
    # bf16 has 8 bits: 2^-8 for each of a few roundings of values of about one.
    by_waves(case).assert_close(by_autograd(case.wide()), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("gated", "n_tokens", "dtype"),
    all_pairs([False, True], [41, 301], [torch.float32, torch.bfloat16]),
)
def test_every_division_into_waves_gives_the_same_bits(
    gated: bool, n_tokens: int, dtype: torch.dtype
) -> None:
    case = Case.make("some without tokens", gated=gated, n_tokens=n_tokens, dtype=dtype)
    whole = by_waves(case)
    for cut in range(2 ** (N_EXPERTS - 1)):
        inner = tuple(e for e in range(1, N_EXPERTS) if cut >> (e - 1) & 1)
        by_waves(case, (0, *inner, N_EXPERTS)).assert_equal(whole)


def test_kept_and_recomputed_hidden_give_the_same_bits() -> None:
    case = Case.make()
    by_waves(case, keep_hidden=True).assert_equal(by_waves(case))


def test_counts_can_be_read_from_the_device() -> None:
    case = Case.make("some without tokens")
    by_waves(case, host_counts=False).assert_equal(by_waves(case))


def test_expert_without_rows_has_zero_gradient() -> None:
    grads = by_waves(Case.make("some without tokens"))
    for expert in (0, 3):
        assert not any(grad[expert].any() for grad in grads.dw)


def test_token_rows_of_one_expert_can_be_divided_and_their_dw_added() -> None:
    case = Case.make(dtype=torch.float64)
    x, dy, weight = case.x, case.dy, case.weights[:, 0]
    record = case.records[:1]

    def backward(rows: slice) -> WaveGrads:
        n = x[rows].shape[0]
        ends = torch.tensor([n], dtype=torch.int32)
        return wave_backward(x[rows], dy[rows], weight[rows], record, case.shape, ends, [n])

    whole = backward(slice(None))
    parts = [backward(slice(0, 13)), backward(slice(13, 14)), backward(slice(14, None))]
    torch.testing.assert_close(torch.cat([p.dx_RD for p in parts]), whole.dx_RD)
    for number, expected in enumerate(whole.dw):
        torch.testing.assert_close(sum(part.dw[number] for part in parts), expected)


def test_dw_is_omitted_if_not_needed() -> None:
    case = Case.make()
    n = case.x.shape[0]
    args = (case.records[:1], case.shape, torch.tensor([n], dtype=torch.int32), [n])
    grads = wave_backward(case.x, case.dy, case.weights[:, 0], *args, need_dw=False)
    full = wave_backward(case.x, case.dy, case.weights[:, 0], *args)
    assert grads.dw == ()
    assert torch.equal(grads.dx_RD, full.dx_RD)


def test_wave_without_rows_gives_empty_outputs_and_zero_gradients() -> None:
    case = Case.make()
    nothing = case.x[:0]
    ends = torch.zeros(2, dtype=torch.int32)
    y, _ = wave_forward(nothing, case.records[:2], case.shape, ends, [0, 0])
    assert y.shape == nothing.shape
    grads = wave_backward(
        nothing, nothing, case.weights[:0, 0], case.records[:2], case.shape, ends, [0, 0]
    )
    assert len(grads.dw) == 2
    assert not any(grad.any() for grad in grads.dw)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["even", "some without tokens", "all to the same"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("host_counts", [False, True])
def test_grouped_kernels_follow_float32_autograd(
    kind: str, top_k: int, gated: bool, host_counts: bool
) -> None:
    case = Case.make(
        kind, top_k, gated, torch.bfloat16, "cuda", d_model=64, d_hidden=128, n_tokens=333
    )
    expected = by_autograd(case.wide())
    # Fill freed memory, so that elements a kernel does not write are not zero by chance.
    dirt = torch.full((16 * 2**20,), float("nan"), device="cuda", dtype=torch.bfloat16)
    del dirt
    for borders in ((0, N_EXPERTS), (0, 1, 4, N_EXPERTS)):
        got = by_waves(case, borders, host_counts=host_counts)
        for name, mine in got.named().items():
            theirs = expected.named()[name]
            # Relative to the largest value: sums of hundreds of terms have large relative errors.
            assert (mine.float() - theirs).abs().max() <= 2e-2 * theirs.abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_float32_on_the_gpu_follows_autograd(gated: bool) -> None:
    case = Case.make("some without tokens", gated=gated, device="cuda")
    by_waves(case).assert_close(by_autograd(case), rtol=1e-4, atol=1e-4)
