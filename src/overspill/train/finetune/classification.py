"""Classification: a label is a text that completes a prompt.

The predicted label of a sentence is the one with the most likely tokens after its prompt.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from overspill.core.errors import ConfigError
from overspill.train.finetune.encoding import Tokenizer, encode, encode_prompts
from overspill.train.finetune.kinds import Labelled, shorten_text
from overspill.train.finetune.rows import IGNORED, Ids, Row, ids, too_long

_MOST_DIGITS = 9  # of a label that is a number; int() refuses thousands


@dataclass(frozen=True)
class Choice:
    """A sentence to complete with one of the labels; only the tokens of the label are learned.

    Rows are made when they are read: with many labels they take far more memory.
    """

    where: str
    head: Ids
    """The sentence in the prompt; for an encoder-decoder model the source."""
    answers: Sequence[Ids]
    """The tokens of each label, which all choices share."""
    label: int
    seq2seq: bool

    def row(self, label: int) -> Row:
        """The sentence, completed with a label."""
        answer = self.answers[label]
        if self.seq2seq:
            return Row(self.where, self.head, answer)
        silent = np.full_like(self.head, IGNORED)
        tokens = np.concatenate([self.head, answer])
        return Row(self.where, tokens, np.concatenate([silent, answer]))

    @property
    def right(self) -> Row:
        return self.row(self.label)


class ChoiceRows(Sequence[Row]):
    """Sequence of the rows of all labels of all choices, made when they are read."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = choices
        self._width = len(choices[0].answers) if choices else 0

    def __len__(self) -> int:
        return len(self._choices) * self._width

    @overload
    def __getitem__(self, at: int) -> Row: ...

    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...

    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        number, label = divmod(range(len(self))[at], self._width)
        return self._choices[number].row(label)


def read_words(labels: str | None, examples: Sequence[Labelled]) -> tuple[str, ...]:
    """The word of each label: from --labels, or the numbers in the examples."""
    if labels is None:
        return _count_numbers(examples)
    words = tuple(word.strip() for word in labels.split(","))
    if len(words) < 2 or len(set(words)) < len(words) or not all(words):
        raise ConfigError(f"--labels {labels!r} must be at least two different words, such as a,b")
    return words


def _count_numbers(examples: Sequence[Labelled]) -> tuple[str, ...]:
    wanted = "a label 0, 1, 2, …, or --labels with its word"
    numbers: dict[int, str] = {}
    for example in examples:
        number = _number(example.label)
        if number is None:
            raise _expected(example, wanted)
        numbers.setdefault(number, example.where)
    highest = max(numbers)
    missing = next((number for number in range(highest) if number not in numbers), None)
    if missing is not None:
        raise ConfigError(
            f"{numbers[highest]}: label {highest} is out of range, because no example has label "
            f"{missing}; number labels from 0 without a gap, or name them all with --labels"
        )
    if highest == 0:
        raise ConfigError(f"{numbers[0]}: every example has label 0; give examples of two labels")
    return tuple(str(number) for number in range(highest + 1))


def _number(label: str) -> int | None:
    return int(label) if label.isdecimal() and len(label) <= _MOST_DIGITS else None


def number_labels(examples: Sequence[Labelled], words: Sequence[str]) -> list[int]:
    """The labels of the examples as numbers."""
    by_word = {word: number for number, word in enumerate(words)}
    numbers = []
    for example in examples:
        number = by_word.get(example.label, _number(example.label))
        if number is None or number >= len(words):
            last = len(words) - 1
            names = shorten_text(", ".join(words))
            raise _expected(example, f"a label from 0 to {last} or one of {names}")
        numbers.append(number)
    return numbers


def _expected(example: Labelled, wanted: str) -> ConfigError:
    found = shorten_text(example.label)
    return ConfigError(f"{example.where}: expected {wanted}, found {found!r}")


@dataclass(frozen=True)
class LabelForm:
    """The texts of prompts and labels."""

    words: tuple[str, ...]
    prompt: str
    text: str
    seq2seq: bool


def encode_choices(
    tokenizer: Tokenizer,
    examples: Sequence[Labelled],
    form: LabelForm,
    seq_len: int,
    truncate: bool,
) -> list[Choice]:
    numbers = number_labels(examples, form.words)
    answers = [ids(answer) for answer in _answers(tokenizer, form)]
    prompts = [form.prompt.replace("{sentence}", example.sentence) for example in examples]
    heads = (encode if form.seq2seq else encode_prompts)(tokenizer, prompts)
    # All labels follow the same prompt: the longest determines the space for it.
    longest = max(map(len, answers))
    room = seq_len if form.seq2seq else seq_len - longest
    choices = []
    for example, head, number in zip(examples, heads, numbers, strict=True):
        if len(head) > room:
            if not truncate or room < 1:
                raise too_long(example.where, len(head) + seq_len - room, seq_len)
            head = head[:room] if form.seq2seq else head[-room:]
        choices.append(Choice(example.where, ids(head), answers, number, form.seq2seq))
    return choices


def _answers(tokenizer: Tokenizer, form: LabelForm) -> list[list[int]]:
    """The tokens of each label. If one label is a prefix of another ("1" and "10"), all get an end
    token: without it the prefix would always be at least as likely."""
    texts = [form.text.replace("{label}", word) for word in form.words]
    if form.seq2seq:
        texts = [text.strip() for text in texts]  # a target has no text before it
    answers = encode(tokenizer, texts, special=False)
    # in this order a label is followed by those that begin with it
    begins = any(a == b[: len(a)] for a, b in itertools.pairwise(sorted(answers)))
    end = tokenizer.eos_token_id
    if begins and end is not None:
        answers = [[*answer, end] for answer in answers]
    seen: set[tuple[int, ...]] = set()
    for word, answer in zip(form.words, answers, strict=True):
        if not answer or tuple(answer) in seen:
            raise ConfigError(
                f"label {word!r} has the same tokens as another label, or none; give other words "
                "with --labels"
            )
        seen.add(tuple(answer))
    return answers
