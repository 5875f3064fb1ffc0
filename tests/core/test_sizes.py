import pytest

from overspill.core.errors import ConfigError
from overspill.core.sizes import parse_size


@pytest.mark.parametrize(
    ("size", "expected"),
    [("12GiB", 12 << 30), (" 1.5 GB", 1_500_000_000), (4096, 4096), (0.9e3, 900), ("7", 7)],
)
def test_a_size_is_in_bytes(size: str | float, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "--disk=0 must be more than zero"),
        ("0.4", "must be more than zero"),
        (float("nan"), "--disk=nan must be more than zero and finite"),
        (float("inf"), "must be more than zero and finite"),
        ("9" * 5000, r"--disk='9+\.\.\.9+' must be more than zero and finite$"),
        ("12 apples", "--disk='12 apples' is not a size; write it like 12GiB"),
    ],
)
def test_what_is_no_size_is_named(size: str | float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_size(size, "--disk")
