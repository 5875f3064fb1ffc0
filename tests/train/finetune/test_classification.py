import pytest

from overspill.core.errors import ConfigError
from overspill.train.finetune.classification import (
    LabelForm,
    encode_choices,
    number_of,
    read_words,
)
from overspill.train.finetune.examples import Labelled
from overspill.train.finetune.rows import IGNORED
from tests.train.finetune.tiny import END, make_tokenizer

TOKENIZER = make_tokenizer()


def _labelled(*labels: str) -> list[Labelled]:
    return [Labelled(f"f:{n}", f"s{n}", label) for n, label in enumerate(labels, start=2)]


def test_labels_are_the_numbers_in_the_data_or_the_words_that_are_given() -> None:
    assert read_words(None, _labelled("1", "0", "2", "0")) == ("0", "1", "2")
    words = read_words("bad, good", _labelled("1"))
    assert words == ("bad", "good")
    assert [number_of(example, words) for example in _labelled("1", "bad", "0")] == [1, 0, 0]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["0", "one"], r"f:3: expected a label 0, 1, 2, …, or --labels with its word, found 'one'"),
        (["0", "-1"], r"f:3: expected a label 0, 1, 2.* found '-1'"),
        (["0", "1", "3"], r"f:4: label 3 is out of range, because no example has label 2"),
        (["0", "0"], r"f:2: every example has label 0"),
    ],
)
def test_numbers_that_cannot_be_labels(labels: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_words(None, _labelled(*labels))


def test_a_label_out_of_range_is_named() -> None:
    for wrong in ("2", "ugly", "-1", "0.5"):
        (example,) = _labelled(wrong)
        with pytest.raises(ConfigError, match=rf"f:2: expected a label from 0 to 1 .*'{wrong}'"):
            number_of(example, ("bad", "good"))
    for wrong in ("one", "a,a", "a,,b"):
        with pytest.raises(ConfigError, match="must be at least two different words"):
            read_words(wrong, _labelled("1"))


def _decoded(tokens: list[int]) -> str:
    return str(TOKENIZER.decode([token for token in tokens if token != IGNORED]))


def test_each_label_follows_the_same_prompt() -> None:
    form = LabelForm(("bad", "good"), "<{sentence}>", "={label}", seq2seq=False)
    (choice,) = encode_choices(TOKENIZER, _labelled("1"), form, 64, truncate=False)
    assert [_decoded(row.tokens.tolist()) for row in choice.rows] == ["<s2>=bad", "<s2>=good"]
    assert [_decoded(row.labels.tolist()) for row in choice.rows] == ["=bad", "=good"]
    assert choice.right is choice.rows[1]


def test_labels_that_begin_alike_are_told_apart_by_their_end() -> None:
    words = tuple(str(n) for n in range(11))
    form = LabelForm(words, "{sentence}", "{label}", seq2seq=False)
    (choice,) = encode_choices(TOKENIZER, _labelled("1"), form, 64, truncate=False)
    assert all(row.tokens[-1] == END and row.labels[-1] == END for row in choice.rows)
    same = LabelForm(("a", "a "), "{sentence}", "{label}", seq2seq=True)
    with pytest.raises(ConfigError, match=r"label 'a ' has the same tokens"):
        encode_choices(TOKENIZER, _labelled("0"), same, 64, truncate=False)


def test_an_encoder_decoder_chooses_a_target() -> None:
    form = LabelForm(("bad", "good"), "{sentence}?", " {label}", seq2seq=True)
    (choice,) = encode_choices(TOKENIZER, _labelled("0"), form, 64, truncate=False)
    assert [_decoded(row.tokens.tolist()) for row in choice.rows] == ["s2?", "s2?"]
    assert [_decoded(row.labels.tolist()) for row in choice.rows] == ["bad", "good"]


def test_a_long_sentence_is_refused_or_cut_for_all_labels_alike() -> None:
    form = LabelForm(("bad", "good"), "{sentence}?", "{label}", seq2seq=False)
    long = [Labelled("f:9", "abcdefgh", "0")]
    with pytest.raises(ConfigError, match=r"f:9: 13 tokens exceed --seq-len 8"):
        encode_choices(TOKENIZER, long, form, 8, truncate=False)
    (choice,) = encode_choices(TOKENIZER, long, form, 8, truncate=True)
    assert [_decoded(row.tokens.tolist()) for row in choice.rows] == ["fgh?bad", "fgh?good"]
    with pytest.raises(ConfigError, match=r"f:9: 13 tokens"):
        encode_choices(TOKENIZER, long, form, 4, truncate=True)
