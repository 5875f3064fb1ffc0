"""Classification: a label is a text that completes a prompt.

The predicted label of a sentence is the one with the most likely tokens after its prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from overspill.core.errors import ConfigError
from overspill.train.finetune.encoding import Tokenizer, encode, encode_prompts
from overspill.train.finetune.examples import Labelled
from overspill.train.finetune.rows import Row, ids, make_row, too_long


@dataclass(frozen=True)
class Choice:
    """A sentence completed with each label; only the tokens of the label are learned."""

    rows: tuple[Row, ...]
    label: int

    @property
    def right(self) -> Row:
        return self.rows[self.label]


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
        if not example.label.isdecimal():
            raise _expected(example, wanted)
        numbers.setdefault(int(example.label), example.where)
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


def number_of(example: Labelled, words: Sequence[str]) -> int:
    """The label of an example as a number."""
    if example.label in words:
        return words.index(example.label)
    if example.label.isdecimal() and int(example.label) < len(words):
        return int(example.label)
    raise _expected(example, f"a label from 0 to {len(words) - 1} or one of {', '.join(words)}")


def _expected(example: Labelled, wanted: str) -> ConfigError:
    return ConfigError(f"{example.where}: expected {wanted}, found {example.label!r}")


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
    numbers = [number_of(example, form.words) for example in examples]
    answers = _answers(tokenizer, form)
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
        rows = tuple(_row(example.where, head, answer, form.seq2seq) for answer in answers)
        choices.append(Choice(rows, number))
    return choices


def _row(where: str, head: list[int], answer: list[int], seq2seq: bool) -> Row:
    if seq2seq:
        return Row(where, ids(head), ids(answer))
    return make_row(where, head + answer, [False] * len(head) + [True] * len(answer))


def _answers(tokenizer: Tokenizer, form: LabelForm) -> list[list[int]]:
    """The tokens of each label. If one label is a prefix of another ("1" and "10"), all get an end
    token: without it the prefix would always be at least as likely."""
    texts = [form.text.replace("{label}", word) for word in form.words]
    if form.seq2seq:
        texts = [text.strip() for text in texts]  # a target has no text before it
    answers = encode(tokenizer, texts, special=False)
    begins = any(a is not b and a == b[: len(a)] for a in answers for b in answers)
    end = tokenizer.eos_token_id
    if begins and end is not None:
        answers = [[*answer, end] for answer in answers]
    for number, answer in enumerate(answers):
        if not answer or answer in answers[:number]:
            raise ConfigError(
                f"label {form.words[number]!r} has the same tokens as another label, or none; give "
                "other words with --labels"
            )
    return answers
