"""The dense products compared with torch, in Triton's interpreter and on a GPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from overspill.compute.activation_form import Function
from overspill.compute.decode import constants
from tests.compute.decode.near import assert_near, needs_triton, random, rms_norm
from tests.compute.test_grouped_triton import FP32, every_device, every_dtype

pytestmark = needs_triton


@pytest.fixture
def linear() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute.decode.linear import linear

    return linear


@every_device
@every_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_rows", "n", "width"), [(1, 7, 20), (3, 8, 32), (2, 3, 2100)])
def test_rows_are_multiplied_by_a_matrix(
    linear: Any, n_rows: int, n: int, width: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    x, w = (random(rows, width, dtype=dtype, device=device) for rows in (n_rows, n))
    b = random(n, dtype=dtype, device=device) if bias else None
    expected = F.linear(x.double(), w.double(), None if b is None else b.double())
    out = linear(x, w, b)
    assert out.dtype is dtype
    assert_near(out, expected, dtype)
    wide = linear(x, w, b, FP32)
    assert wide.dtype is FP32
    assert_near(wide, expected, FP32)
    assert torch.equal(linear(x, w, b, function=Function.RELU), out.relu())


@every_device
@every_dtype
@pytest.mark.parametrize("shift", [False, True])
def test_products_of_norms_are_added_to_others(
    linear: Any, shift: bool, dtype: torch.dtype, device: str
) -> None:
    from overspill.compute.decode.linear import RowNorm, reads_rows_whole

    x, w, into = (random(*s, dtype=dtype, device=device) for s in ((2, 20), (7, 20), (2, 7)))
    x += 3  # layer norms subtract the mean
    gain, bias = (random(20, dtype=dtype, device=device) for _ in range(2))
    normed = rms_norm(x, gain, 1e-3)
    if shift:
        normed = F.layer_norm(x.double(), (20,), gain.double(), bias.double(), 1e-3)
    product = F.linear(normed, w.double())
    norm = RowNorm(gain, bias if shift else None, 1e-3)
    assert reads_rows_whole(w)
    assert_near(linear(x, w, norm=norm), product, dtype)
    expected = into.double() + product
    assert linear(x, w, norm=norm, into_BN=into) is into
    assert_near(into, expected, dtype)


@every_device
@every_dtype
def test_inputs_may_be_gated_and_have_a_share(linear: Any, dtype: torch.dtype, device: str) -> None:
    from overspill.compute.decode.linear import gate_rows

    x, w = random(2, 2 * 20 + 1, dtype=dtype, device=device), random(7, 20, dtype=dtype)
    w = w.to(device)
    gate, up, share = x.double().split((20, 20, 1), 1)
    expected = F.linear(F.silu(gate) * up, w.double()) * share.sigmoid()
    assert_near(linear(x, w, gate=Function.SILU), expected, dtype, roundings=2)
    rows = gate_rows(F.pad(x, (0, 3)), 20, Function.SILU)
    assert_near(F.linear(rows.double(), w.double()), expected, dtype, roundings=2)


@every_device
@every_dtype
@pytest.mark.parametrize("width", [40, 1030])
def test_large_matrices_are_read_in_other_pieces(
    linear: Any, width: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "LARGE", 1)
    x, w = (random(rows, width, dtype=dtype, device=device) for rows in (2, 19))
    b = random(19, dtype=dtype, device=device)
    assert_near(linear(x, w, b), F.linear(x.double(), w.double(), b.double()), dtype)
