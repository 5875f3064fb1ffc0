"""The norms compared with naive torch code, in Triton's interpreter and on a GPU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.compute.decode.near import NAN, assert_near, needs_triton, random, rms_norm
from tests.compute.test_grouped_triton import FP32, every_device, every_dtype

pytestmark = needs_triton


@pytest.fixture
def add_norm() -> Any:
    """Imported late: it needs Triton."""
    from overspill.compute.decode.norm import add_norm

    return add_norm


@every_device
@every_dtype
@pytest.mark.parametrize("n_parts", [0, 1, 2])
@pytest.mark.parametrize("width", [32, 20])
def test_parts_are_added_to_the_residual_before_its_norm(
    add_norm: Any, n_parts: int, width: int, dtype: torch.dtype, device: str
) -> None:
    residual = random(3, width, dtype=dtype, device=device)
    before = residual.double()
    # what experts add is float32
    parts = [random(3, width, dtype=d, device=device) for d in (FP32, dtype)][:n_parts]
    weight, shift = random(width, dtype=dtype, device=device), float(n_parts)
    out = add_norm(residual, parts, weight, 1e-5, shift=shift)
    assert out.dtype is residual.dtype is dtype
    assert_near(residual, before + sum(part.double() for part in parts), dtype)
    if not parts:
        assert torch.equal(residual.double(), before)
    assert_near(out, rms_norm(residual, weight.double() + shift, 1e-5), dtype)


@every_device
@every_dtype
def test_layer_norms_are_scaled(add_norm: Any, dtype: torch.dtype, device: str) -> None:
    residual, part, weight, bias = (
        random(*shape, dtype=dtype, device=device) for shape in ((3, 20), (3, 20), (20,), (20,))
    )
    residual += 3  # the mean is subtracted
    out = add_norm(residual, [part], weight, 1e-5, bias_D=bias, scale=0.3)
    norm = F.layer_norm(residual.double(), (20,), weight.double(), bias.double(), 1e-5)
    assert_near(out, norm * 0.3, dtype)


@every_device
@every_dtype
def test_rows_of_the_cpu_are_added_where_experts_were_missed_and_not_read_elsewhere(
    add_norm: Any, dtype: torch.dtype, device: str
) -> None:
    from overspill.compute.decode.cpu import CpuRows

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
        host = CpuRows(rows, missed, torch.ones_like(missed[:1]))
        out = add_norm(mine, parts[:n_parts], weight, 1e-6, host)
        assert_near(mine, expected, dtype)
        assert_near(out, rms_norm(mine, weight, 1e-6), dtype)
