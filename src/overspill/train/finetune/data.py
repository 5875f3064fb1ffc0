"""The data of a run: files → examples → rows for training and evaluation."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from overspill.core.errors import ConfigError
from overspill.train.finetune import alpaca
from overspill.train.finetune.chat import encode_chats, set_template
from overspill.train.finetune.classification import (
    Choice,
    ChoiceRows,
    LabelForm,
    encode_choices,
    read_words,
)
from overspill.train.finetune.config import FinetuneDataSection
from overspill.train.finetune.encoding import (
    Tokenizer,
    encode_pairs,
    encode_sources,
    encode_texts,
    separator,
)
from overspill.train.finetune.examples import Examples, find_examples, read_examples
from overspill.train.finetune.kinds import Chat, Example, Kind, Labelled, Pair, Text
from overspill.train.finetune.packing import pack_cut, pack_whole
from overspill.train.finetune.questions import (
    AnswerLimits,
    Questions,
    check_kind,
    encode_questions,
)
from overspill.train.finetune.rows import Ids, Row, shorten, split, without_first_label


@dataclass(frozen=True)
class EncodingPlan:
    """Rules for encoding examples, from the model, the settings and the kind of the data."""

    kind: Kind
    seq_len: int
    seq2seq: bool
    packing: bool
    section: FinetuneDataSection
    words: tuple[str, ...]
    """The labels; empty if there are none."""


@dataclass(frozen=True)
class FinetuneData:
    kind: Kind
    train: list[Row]
    eval_rows: list[Row]
    eval_choices: list[Choice]
    """Sentences with all their labels, for classification; then `eval_rows` is empty."""
    packing: bool
    questions: Questions | None = None
    """The examples for evaluation whose answers are generated; with --metric only."""

    @property
    def evaluates(self) -> bool:
        return bool(self.eval_rows or self.eval_choices)

    @property
    def rows(self) -> Iterator[Row]:
        """All rows of training and evaluation, including a row for each label of a sentence."""
        return itertools.chain(self.train, self.eval_rows, ChoiceRows(self.eval_choices))

    @property
    def tokens(self) -> Iterator[Ids]:
        """The arrays of tokens and labels; the labels of sentences occur only once."""
        for row in (*self.train, *self.eval_rows):
            yield from (row.tokens, row.labels)
        yield from (choice.head for choice in self.eval_choices)
        yield from (answer for choice in self.eval_choices[:1] for answer in choice.answers)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of all tokens: it depends on files, tokenizer, templates and split."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            for part in (row.tokens, row.labels):
                digest.update(len(part).to_bytes(8) + part.tobytes())
        return digest.hexdigest()


def check_sources(section: FinetuneDataSection) -> None:
    """Raises if there are no files to read."""
    if not section.data:
        raise ConfigError("DATA is missing; give a .jsonl, .tsv or text file after the checkpoint")
    find_examples(section.data)
    if section.eval_data is not None:
        find_examples([section.eval_data], "--eval-data")


def load_data(
    section: FinetuneDataSection,
    tokenizer: Tokenizer,
    seq_len: int,
    model_config: Any,
    seed: int,
    say: Callable[[str], None],
    metrics: Sequence[str] = (),
) -> FinetuneData:
    """The rows of all examples and, for `metrics`, the questions of the examples for evaluation."""
    check_sources(section)
    examples = read_examples(section.data)
    if files := examples.text_files:
        more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
        say(f"data: plain text of {files[0]}{more}")
    held_out = None
    if section.eval_data is not None:
        held_out = read_examples([section.eval_data], "--eval-data", examples.kind)
    seq2seq = bool(model_config.is_encoder_decoder)
    if examples.kind is Kind.INSTRUCTION:
        has_template = (tokenizer.chat_template or section.chat_template) is not None
        to_chats = has_template and not seq2seq
        examples = alpaca.convert(examples, to_chats)
        held_out = held_out and alpaca.convert(held_out, to_chats)
        form = "chats, by the chat template" if to_chats else "pairs, with the prompt of Alpaca"
        say(f"data: instructions become {form}")
    plan = _plan_encoding(section, examples, seq_len, seq2seq)
    if metrics:
        check_kind(plan.kind, examples.items[0].where, metrics)
    if plan.kind is Kind.CHAT:
        set_template(tokenizer, section.chat_template)
    elif section.chat_template is not None:
        raise ConfigError('--chat-template is for data with chat "messages"; omit it')
    train, evaluation = _split(examples.items, held_out, section, seed)
    say(f"data: tokenizing {len(train) + len(evaluation):,} examples")
    data = _encode(plan, tokenizer, train, evaluation)
    if metrics:
        limits = AnswerLimits(seq_len, section.metric_tokens, section.truncate)
        start = model_config.decoder_start_token_id if seq2seq else None
        questions = encode_questions(tokenizer, plan.kind, evaluation, limits, start)
        data = dataclasses.replace(data, questions=questions)
    n_rows, most = len(data.eval_rows), section.eval_examples
    if examples.text_files and held_out is None and n_rows > most:  # they are longer than rows
        kept = [data.eval_rows[i * n_rows // most] for i in range(most)]
        data = dataclasses.replace(data, eval_rows=kept)
    _check_vocabulary(data, tokenizer, model_config)
    _describe(data, len(train), len(evaluation), seq_len, say)
    return data


def _plan_encoding(
    section: FinetuneDataSection, examples: Examples, seq_len: int, seq2seq: bool
) -> EncodingPlan:
    kind = examples.kind
    if seq2seq and kind in (Kind.TEXT, Kind.CHAT):
        raise ConfigError(
            f"{examples.items[0].where}: an encoder-decoder model needs a source and a target, "
            f'found {kind.description}; give "prompt" and "completion", or a .tsv'
        )
    if section.packing and (seq2seq or kind is Kind.LABELLED):
        what = "an encoder-decoder model" if seq2seq else "classification"
        raise ConfigError(f"--packing is not supported for {what}; omit it")
    if kind is not Kind.LABELLED and section.labels is not None:
        raise ConfigError(f"--labels is for .tsv data, found {kind.description}; omit it")
    words: tuple[str, ...] = ()
    if kind is Kind.LABELLED:
        words = read_words(section.labels, cast(Sequence[Labelled], examples.items))
    packing = section.packing
    if packing is None:
        packing = kind in (Kind.TEXT, Kind.CHAT)
    return EncodingPlan(kind, seq_len, seq2seq, packing, section, words)


def _split(
    examples: Sequence[Example], held_out: Examples | None, section: FinetuneDataSection, seed: int
) -> tuple[list[Example], list[Example]]:
    """The examples for training and for evaluation."""
    if held_out is not None:
        return list(examples), list(held_out.items)
    if section.eval_split == 0:
        return list(examples), []
    count = min(section.eval_examples, max(1, round(len(examples) * section.eval_split)))
    if count >= len(examples):
        raise ConfigError(
            f"--eval-split {section.eval_split:g} takes every example of DATA (it has "
            f"{len(examples)}); give more, or --eval-split 0"
        )
    taken = set(np.random.default_rng(seed).permutation(len(examples))[:count].tolist())
    train = [example for number, example in enumerate(examples) if number not in taken]
    return train, [example for number, example in enumerate(examples) if number in taken]


def _encode(
    plan: EncodingPlan,
    tokenizer: Tokenizer,
    train: Sequence[Example],
    evaluation: Sequence[Example],
) -> FinetuneData:
    if plan.kind is Kind.LABELLED:
        form = LabelForm(
            plan.words, plan.section.label_prompt, plan.section.label_text, plan.seq2seq
        )
        choices, held_out = (
            encode_choices(
                tokenizer, cast(Sequence[Labelled], part), form, plan.seq_len, plan.section.truncate
            )
            for part in (train, evaluation)
        )
        rows, eval_rows = [choice.right for choice in choices], list[Row]()
    else:
        held_out = []
        rows, eval_rows = (_rows(plan, tokenizer, part) for part in (train, evaluation))
    return FinetuneData(plan.kind, rows, eval_rows, held_out, plan.packing)


def _rows(plan: EncodingPlan, tokenizer: Tokenizer, examples: Sequence[Example]) -> list[Row]:
    """Rows of at most seq_len tokens, packed or not, without rows that have no learned token."""
    if not examples:
        return []
    seq_len, truncate = plan.seq_len, plan.section.truncate
    if plan.kind is Kind.TEXT:
        texts = list(encode_texts(tokenizer, cast(Sequence[Text], examples)))
        if plan.packing:
            rows = pack_cut(texts, seq_len)
        else:
            rows = [piece for text in texts for piece in split(text, seq_len)]
    else:
        if plan.kind is Kind.CHAT:
            found = encode_chats(tokenizer, cast(Sequence[Chat], examples))
        else:
            encode = encode_sources if plan.seq2seq else encode_pairs
            found = encode(tokenizer, cast(Sequence[Pair], examples))
        keep_end = plan.kind is Kind.PAIR and not plan.seq2seq
        rows = [shorten(row, seq_len, truncate, keep_end) for row in found]
        if plan.packing:
            rows = pack_whole(rows, seq_len, separator(tokenizer))
    if not plan.seq2seq:
        rows = [without_first_label(row) for row in rows]
    rows = [row for row in rows if row.learned]
    if not rows:
        raise ConfigError(
            f"{examples[0].where}: no learned token is left within --seq-len {seq_len}; raise it"
        )
    return rows


def _check_vocabulary(data: FinetuneData, tokenizer: Tokenizer, model_config: Any) -> None:
    """Raise if a token has no embedding: it would fail inside the model."""
    size = getattr(model_config.get_text_config(), "vocab_size", None)
    if size is None:
        return
    for tokens in data.tokens:
        highest = int(tokens.max(initial=0))
        if highest >= size:
            raise ConfigError(
                f"the tokenizer {tokenizer.name_or_path} produces token {highest}, the model's "
                f"vocabulary has {size}; give the model's tokenizer with --tokenizer"
            )


def _describe(
    data: FinetuneData, examples: int, held_out: int, seq_len: int, say: Callable[[str], None]
) -> None:
    tokens = sum(len(row.tokens) for row in data.train)
    learned = sum(row.learned for row in data.train)
    rows = ""
    if data.packing and held_out:
        rows = f", in {len(data.eval_rows):,} sequences of at most {seq_len} tokens"
    packed = f", packed into {len(data.train):,} of {seq_len}" if data.packing else ""
    say(
        f"data: {examples:,} examples, {tokens:,} tokens ({learned:,} learned){packed}; "
        f"{held_out:,} examples for evaluation{rows}"
    )
