import time

import pytest

from overspill.core.errors import ConfigError
from overspill.train.finetune.classification import (
    ChoiceRows,
    LabelForm,
    encode_choices,
    number_labels,
    read_words,
)
from overspill.train.finetune.kinds import Labelled
from overspill.train.finetune.rows import IGNORED
from tests.train.finetune.tiny import END, make_tokenizer

TOKENIZER = make_tokenizer()


def _labelled(*labels: str) -> list[Labelled]:
    return [Labelled(f"f:{n}", f"s{n}", label) for n, label in enumerate(labels, start=2)]


def test_labels_are_the_numbers_in_the_data_or_the_words_that_are_given() -> None:
    assert read_words(None, _labelled("1", "0", "2", "0")) == ("0", "1", "2")
    words = read_words("bad, good", _labelled("1"))
    assert words == ("bad", "good")
    assert number_labels(_labelled("1", "bad", "0"), words) == [1, 0, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["0", "one"], r"f:3: expected a label 0, 1, 2, …, or --labels with its word, found 'one'"),
        (["0", "-1"], r"f:3: expected a label 0, 1, 2.* found '-1'"),
        (["0", "1", "3"], r"f:4: label 3 is out of range, because no example has label 2"),
        (["0", "0"], r"f:2: every example has label 0"),
        (["0", "9" * 5000], r"f:3: expected a label 0, 1, 2.* found '9{40}…'$"),
    ],
)
def test_numbers_that_cannot_be_labels(labels: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_words(None, _labelled(*labels))


def test_a_label_out_of_range_is_named() -> None:
    for wrong in ("2", "ugly", "-1", "0.5"):
        with pytest.raises(ConfigError, match=rf"f:2: expected a label from 0 to 1 .*'{wrong}'"):
            number_labels(_labelled(wrong), ("bad", "good"))
    with pytest.raises(ConfigError, match=r"f:2: expected a label .*found '7{40}…'$"):
        number_labels(_labelled("7" * 5000), ("bad", "good"))
    for wrong in ("one", "a,a", "a,,b"):
        with pytest.raises(ConfigError, match="must be at least two different words"):
            read_words(wrong, _labelled("1"))


def _decoded(tokens: list[int]) -> str:
    return str(TOKENIZER.decode([token for token in tokens if token != IGNORED]))


def test_each_label_follows_the_same_prompt() -> None:
    form = LabelForm(("bad", "good"), "<{sentence}>", "={label}", seq2seq=False)
    (choice,) = encode_choices(TOKENIZER, _labelled("1"), form, 64, truncate=False)
    assert [_decoded(row.tokens.tolist()) for row in ChoiceRows([choice])] == [
        "<s2>=bad",
        "<s2>=good",
    ]
    assert [_decoded(row.labels.tolist()) for row in ChoiceRows([choice])] == ["=bad", "=good"]
    assert _decoded(choice.right.tokens.tolist()) == "<s2>=good"


def test_labels_that_begin_alike_are_told_apart_by_their_end() -> None:
    words = tuple(str(n) for n in range(11))
    form = LabelForm(words, "{sentence}", "{label}", seq2seq=False)
    (choice,) = encode_choices(TOKENIZER, _labelled("1"), form, 64, truncate=False)
    assert all(row.tokens[-1] == END and row.labels[-1] == END for row in ChoiceRows([choice]))
    same = LabelForm(("a", "a "), "{sentence}", "{label}", seq2seq=True)
    with pytest.raises(ConfigError, match=r"label 'a ' has the same tokens"):
        encode_choices(TOKENIZER, _labelled("0"), same, 64, truncate=False)


@pytest.mark.parametrize("seq2seq", [False, True])
def test_rows_of_labels_are_read_one_by_one(seq2seq: bool) -> None:
    words = ("a", "b", "c")
    form = LabelForm(words, "{sentence}", "{label}", seq2seq)
    choices = encode_choices(TOKENIZER, _labelled("1", "c"), form, 64, truncate=False)
    rows = ChoiceRows(choices)
    found = [(row.where, _decoded(row.labels.tolist())) for row in rows]
    assert found == [(f"f:{line}", word) for line in (2, 3) for word in words]
    assert [row.where for row in rows[1:5:2]] == ["f:2", "f:3"]
    assert _decoded(rows[-1].labels.tolist()) == "c"
    assert (len(rows), len(ChoiceRows([]))) == (6, 0)
    with pytest.raises(IndexError):
        rows[6]


def test_many_labels_that_begin_alike_are_compared_in_order() -> None:
    words = tuple(str(n) for n in range(20_000))
    form = LabelForm(words, "{sentence}", "{label}", seq2seq=False)
    started = time.process_time()
    (choice,) = encode_choices(TOKENIZER, _labelled("77"), form, 64, truncate=False)
    assert time.process_time() - started < 10, "comparing each with each takes minutes"
    assert choice.right.tokens[-1] == END


def test_an_encoder_decoder_chooses_a_target() -> None:
    form = LabelForm(("bad", "good"), "{sentence}?", " {label}", seq2seq=True)
    (choice,) = encode_choices(TOKENIZER, _labelled("0"), form, 64, truncate=False)
    assert [_decoded(row.tokens.tolist()) for row in ChoiceRows([choice])] == ["s2?", "s2?"]
    assert [_decoded(row.labels.tolist()) for row in ChoiceRows([choice])] == ["bad", "good"]


def test_a_long_sentence_is_refused_or_cut_for_all_labels_alike() -> None:
    form = LabelForm(("bad", "good"), "{sentence}?", "{label}", seq2seq=False)
    long = [Labelled("f:9", "abcdefgh", "0")]
    with pytest.raises(ConfigError, match=r"f:9: 13 tokens exceed --seq-len 8"):
        encode_choices(TOKENIZER, long, form, 8, truncate=False)
    (choice,) = encode_choices(TOKENIZER, long, form, 8, truncate=True)
    assert [_decoded(row.tokens.tolist()) for row in ChoiceRows([choice])] == [
        "fgh?bad",
        "fgh?good",
    ]
    with pytest.raises(ConfigError, match=r"f:9: 13 tokens"):
        encode_choices(TOKENIZER, long, form, 4, truncate=True)
