"""Codes of packed weights against their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.compute.formats import (
    E2M1,
    decode_e4m3,
    decode_e8m0,
    has_nan,
    scale_groups,
    subtract_groups,
    unpack_awq,
    unpack_integers,
    unpack_nibbles,
)
from tests.models.huggingface.packed.naive import AWQ_COLUMNS, e2m1, e4m3, e8m0, nibble

BYTES = torch.arange(256, dtype=torch.uint8)
WORDS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=12)


def same_bits(values: torch.Tensor, expected: list[float]) -> bool:
    """Compares signs of zeros too, and NaN with NaN."""
    other = torch.tensor(expected)
    numbers = ~other.isnan()
    same = torch.equal(values[numbers].view(torch.int32), other[numbers].view(torch.int32))
    return same and torch.equal(values.isnan(), ~numbers)


def test_every_code_of_one_byte() -> None:
    assert same_bits(decode_e4m3(BYTES), [e4m3(code) for code in range(256)])
    assert same_bits(decode_e8m0(BYTES), [e8m0(code) for code in range(256)])
    assert same_bits(decode_e8m0(BYTES.view(torch.float8_e8m0fnu)), [e8m0(c) for c in range(256)])
    pairs = [half for byte in range(256) for half in (e2m1(byte & 15), e2m1(byte >> 4))]
    assert same_bits(unpack_nibbles(BYTES, E2M1), pairs)
    assert unpack_nibbles(BYTES.view(2, 8, 16), E2M1).shape == (2, 8, 32)


@given(st.binary(max_size=40))
def test_codes_that_are_nan_are_found(codes: bytes) -> None:
    stored = torch.tensor(list(codes), dtype=torch.uint8)
    assert has_nan(stored) == any(code & 127 == 127 for code in codes)
    assert has_nan(torch.cat((stored, torch.tensor([255], dtype=torch.uint8))))
    assert has_nan(torch.cat((torch.tensor([127], dtype=torch.uint8), stored)))


@given(WORDS)
def test_integers_have_the_first_code_in_the_lowest_bits(words: list[int]) -> None:
    stored = torch.tensor(words, dtype=torch.int32)
    four = [float(nibble(word, place)) for word in words for place in range(8)]
    eight = [float(word >> 8 * place & 255) for word in words for place in range(4)]
    awq = [float(nibble(word, AWQ_COLUMNS.index(column))) for word in words for column in range(8)]
    assert unpack_integers(stored, 4).tolist() == four
    assert unpack_integers(stored, 8).tolist() == eight
    assert unpack_awq(stored).tolist() == awq
    assert (
        unpack_integers(stored.view(1, -1).T, 4).tolist() == torch.tensor(four).view(-1, 8).tolist()
    )


@pytest.mark.parametrize(("columns", "group"), [(12, 4), (13, 4), (3, 4), (4, 4), (5, 1)])
def test_the_last_group_may_be_a_part(columns: int, group: int) -> None:
    random = torch.Generator().manual_seed(columns)
    values = torch.randn(6, columns, generator=random)
    each = torch.randn(6, -(-columns // group), generator=random)
    scaled, moved = values.clone(), values.clone()
    scale_groups(scaled, each, group)
    subtract_groups(moved, each, group)
    for row in range(6):
        for column in range(columns):
            factor = each[row, column // group]
            assert scaled[row, column] == values[row, column] * factor
            assert moved[row, column] == values[row, column] - factor
