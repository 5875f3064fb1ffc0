import pytest
import torch

from overspill.core.errors import ConfigError
from overspill.train.finetune.rows import (
    IGNORED,
    Row,
    collate,
    ids,
    make_row,
    shorten,
    split,
    without_first_label,
)

# four tokens of a prompt, three of an answer
ROW = make_row("f:7", [1, 2, 3, 4, 5, 6, 7], [False] * 4 + [True] * 3)


def test_a_row_knows_what_is_learned() -> None:
    assert ROW.learned == 3
    assert ROW.labels.tolist() == [IGNORED] * 4 + [5, 6, 7]
    whole = make_row("f:1", [1, 2], [True, True])
    assert without_first_label(whole).labels.tolist() == [IGNORED, 2]
    assert whole.labels.tolist() == [1, 2]


def test_a_long_row_is_refused_with_its_line_or_cut() -> None:
    assert shorten(ROW, 7, truncate=False, keep_end=True) is ROW
    with pytest.raises(ConfigError, match=r"f:7: 7 tokens exceed --seq-len 6.*--trun"):
        shorten(ROW, 6, truncate=False, keep_end=True)
    assert shorten(ROW, 5, truncate=True, keep_end=False).tokens.tolist() == [1, 2, 3, 4, 5]


def test_the_answer_is_the_last_to_be_cut() -> None:
    assert shorten(ROW, 5, truncate=True, keep_end=True).tokens.tolist() == [3, 4, 5, 6, 7]
    short = shorten(ROW, 2, truncate=True, keep_end=True)
    assert short.tokens.tolist() == short.labels.tolist() == [5, 6]


def test_a_target_may_be_longer_than_its_source() -> None:
    row = Row("f:1", ids([1]), ids([2, 3, 4]))
    cut = shorten(row, 2, truncate=True, keep_end=False)
    assert (cut.tokens.tolist(), cut.labels.tolist()) == ([1], [2, 3])


def test_pieces_hold_all_tokens_in_order() -> None:
    pieces = split(ROW, 3)
    assert [piece.tokens.tolist() for piece in pieces] == [[1, 2, 3], [4, 5, 6], [7]]
    assert [piece.learned for piece in pieces] == [0, 2, 1]


def test_padding_is_on_the_right_masked_and_not_learned() -> None:
    rows = [make_row("a", [1, 2, 3], [False, True, True]), make_row("b", [4], [True])]
    batch = collate(rows, pad=9, device=torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3], [4, IGNORED, IGNORED]]


def test_source_and_target_are_padded_each_to_its_own_length() -> None:
    rows = [Row("a", ids([1]), ids([2, 3])), Row("b", ids([4, 5, 6]), ids([7]))]
    batch = collate(rows, pad=0, device=torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[1, 0, 0], [4, 5, 6]]
    assert batch["labels"].tolist() == [[2, 3], [7, IGNORED]]
