"""Makes `torch.testing.assert_close` faster: it prepares messages before it compares."""

import functools
from typing import Any

import torch
from torch import Tensor, nn


def compare_first() -> None:
    """Tensors that are close are compared only, which takes a fifth of the time. All others go to
    torch's function, which also raises the errors."""
    check = torch.testing.assert_close

    @functools.wraps(check)
    def assert_close(actual: Any, expected: Any, **options: Any) -> None:
        if not (_are_plain(actual, expected) and _are_close(actual, expected, **options)):
            check(actual, expected, **options)

    torch.testing.assert_close = assert_close


def _are_plain(actual: Any, expected: Any) -> bool:
    """Whether both are ordinary tensors, of the same kind."""
    if type(actual) not in (Tensor, nn.Parameter) or type(expected) not in (Tensor, nn.Parameter):
        return False
    kinds = {
        (x.dtype, x.device, x.shape, x.layout, x.is_quantized) for x in (actual.data, expected.data)
    }
    return len(kinds) == 1 and actual.layout is torch.strided and actual.device.type != "meta"


def _are_close(
    actual: Tensor,
    expected: Tensor,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    msg: object = None,
    **others: Any,
) -> bool:
    if others or actual.is_quantized:
        return False
    with torch.no_grad():
        if rtol is None or atol is None or not actual.dtype.is_floating_point:
            return (rtol is None) == (atol is None) and torch.equal(actual, expected)
        return torch.allclose(actual, expected, rtol, atol, equal_nan)
