from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overspill.train.finetune.packing import pack_cut, pack_whole
from overspill.train.finetune.rows import IGNORED, Row, ids, make_row

END = 99
SEPARATOR = ids([END])


def _rows(lengths: list[int]) -> list[Row]:
    """Rows whose tokens tell which row they are of; every other token is learned."""
    return [
        make_row(f"f:{number}", [number] * length, [at % 2 == 1 for at in range(length)])
        for number, length in enumerate(lengths)
    ]


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 12))
def test_a_cut_stream_is_the_stream(lengths: list[int], seq_len: int) -> None:
    rows = _rows(lengths)
    packed = pack_cut(rows, seq_len)
    for field in ("tokens", "labels"):
        stream = np.concatenate([getattr(row, field) for row in packed])
        assert np.array_equal(stream, np.concatenate([getattr(row, field) for row in rows]))
    assert all(len(row.tokens) == seq_len for row in packed[:-1])


@given(LENGTHS, st.integers(12, 40), st.sampled_from([SEPARATOR, ids([])]))
def test_whole_rows_are_conserved_and_not_cut(
    lengths: list[int], seq_len: int, separator: np.ndarray
) -> None:
    rows = _rows(lengths)
    packed = pack_whole(rows, seq_len, separator)
    assert all(len(row.tokens) <= seq_len for row in packed)
    found: Counter[int] = Counter()
    for row in packed:
        own = row.tokens[row.tokens != END]
        found.update(own.tolist())
        # each example lies in one piece
        starts = 1 + int((np.diff(own) != 0).sum())
        assert starts == len(set(own.tolist()))
        assert (row.labels[row.tokens == END] == IGNORED).all()
        learned = row.labels != IGNORED
        assert np.array_equal(row.labels[learned], row.tokens[learned])
    assert found == Counter(dict(enumerate(lengths)))
    assert sum(row.learned for row in packed) == sum(row.learned for row in rows)


def test_examples_are_separated_once() -> None:
    rows = [make_row("f:1", [1, END], [True, True]), make_row("f:2", [2], [True])]
    (packed,) = pack_whole(rows, 8, SEPARATOR)
    assert packed.tokens.tolist() == [1, END, 2]
    assert packed.labels.tolist() == [1, END, 2]
    (packed,) = pack_whole(list(reversed(rows))[:1] + _rows([1]), 8, SEPARATOR)
    assert packed.tokens.tolist() == [2, END, 0]
    assert packed.labels.tolist() == [2, IGNORED, IGNORED]


def test_few_tokens_are_padding() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, 500).tolist()
    packed = pack_whole(_rows(lengths), 1024, SEPARATOR)
    assert sum(lengths) / (1024 * len(packed)) > 0.97
