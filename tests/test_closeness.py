"""`torch.testing.assert_close` of the tests finds what torch's own does."""

from typing import Any

import pytest
import torch

ONE = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("actual", "expected", "options"),
    [
        (ONE, ONE + 1e-3, {"rtol": 1e-5, "atol": 1e-6}),
        (ONE, ONE + 1e-3, {}),
        (ONE, ONE.double(), {"rtol": 1e-5, "atol": 1e-6}),
        (ONE, torch.ones(3, 2), {"rtol": 1e-5, "atol": 1e-6}),
        (ONE, ONE.T.contiguous().T, {"check_stride": True}),
        (ONE, ONE.to_sparse(), {}),
        (ONE * float("nan"), ONE * float("nan"), {"rtol": 1e-5, "atol": 1e-6}),
        (ONE.int(), 2 * ONE.int(), {"rtol": 0.1, "atol": 0.1}),
        ([ONE, ONE], [ONE, 2 * ONE], {}),
        (ONE, None, {}),
    ],
)
def test_differences_are_found(actual: Any, expected: Any, options: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, TypeError), match=r"\w"):
        torch.testing.assert_close(actual, expected, **options)


def test_what_is_close_passes_and_messages_are_kept() -> None:
    torch.testing.assert_close(ONE, ONE + 1e-7)
    torch.testing.assert_close(ONE, ONE + 1e-3, rtol=1e-2, atol=0.0)
    torch.testing.assert_close(torch.nn.Parameter(ONE), ONE, msg="unused")
    with pytest.raises(AssertionError, match="which weight"):
        torch.testing.assert_close(ONE, 2 * ONE, rtol=0.1, atol=0.1, msg="which weight")
    with pytest.raises(ValueError, match="rtol"):
        torch.testing.assert_close(ONE, ONE, rtol=0.1)
