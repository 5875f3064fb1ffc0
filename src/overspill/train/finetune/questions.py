"""Questions: examples for evaluation whose answers the model generates."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from overspill.core.errors import ConfigError
from overspill.train.finetune.chat import last_answers
from overspill.train.finetune.encoding import (
    Tokenizer,
    encode,
    encode_pairs,
    encode_sources,
    target_prefix,
)
from overspill.train.finetune.kinds import Chat, Example, Kind, Pair
from overspill.train.finetune.rows import IGNORED, Ids, ids, too_long


@dataclass(frozen=True)
class Question:
    where: str
    prompt: Ids
    """Tokens of the prompt; for an encoder-decoder model the source."""
    references: tuple[str, ...]
    most: int
    """Maximum number of tokens of the answer."""


@dataclass(frozen=True)
class Questions:
    items: Sequence[Question]
    ends: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    start: Sequence[int] = ()
    """The first tokens of the decoder, before an answer; empty for a decoder-only model."""


@dataclass(frozen=True)
class AnswerLimits:
    """Maximum lengths of prompts and answers, in tokens."""

    seq_len: int
    """Length of a prompt with its answer; of an encoder-decoder model, of each of them."""
    most: int
    """Length of an answer."""
    truncate: bool
    """Whether to cut the start of prompts that are too long."""

    def fit(
        self, where: str, prompt: Sequence[int] | Ids, references: tuple[str, ...], answer: int
    ) -> Question:
        """A question to a decoder-only model, with room for an answer of `answer` tokens."""
        room = self.seq_len - answer
        if self.truncate:
            prompt = prompt[-max(1, room) :]
        if len(prompt) >= self.seq_len:
            raise too_long(where, len(prompt) + answer, self.seq_len)
        most = min(self.most, self.seq_len - len(prompt))
        return Question(where, ids(list(prompt)), references, most)


def check_kind(kind: Kind, where: str, metrics: Sequence[str]) -> None:
    """Raise if examples of a kind have no answers."""
    if kind not in (Kind.PAIR, Kind.CHAT):
        advice = "accuracy is computed without it" if kind is Kind.LABELLED else "drop it"
        raise ConfigError(
            f"--metric {','.join(metrics)} needs prompts with answers, and {where} is "
            f"{kind.description}; {advice}"
        )


def encode_questions(
    tokenizer: Tokenizer,
    kind: Kind,
    examples: Sequence[Example],
    limits: AnswerLimits,
    decoder_start: int | None,
) -> Questions:
    """The questions of pairs or chats. Prompts have the same tokens as in training. `decoder_start`
    is the first token of the decoder; None for a decoder-only model."""
    if kind is Kind.CHAT:
        found = _of_chats(tokenizer, cast(Sequence[Chat], examples), limits)
    elif decoder_start is None:
        found = _of_pairs(tokenizer, cast(Sequence[Pair], examples), limits)
    else:
        found = _of_sources(tokenizer, cast(Sequence[Pair], examples), limits, decoder_start)
    end = tokenizer.eos_token_id
    own = () if end is None else (int(end),)
    return dataclasses.replace(found, ends=found.ends.union(own))


def _of_pairs(tokenizer: Tokenizer, pairs: Sequence[Pair], limits: AnswerLimits) -> Questions:
    rows = encode_pairs(tokenizer, pairs)
    return Questions(
        [
            limits.fit(pair.where, row.tokens[row.labels == IGNORED], pair.references, row.learned)
            for pair, row in zip(pairs, rows, strict=True)
        ]
    )


def _of_sources(
    tokenizer: Tokenizer, pairs: Sequence[Pair], limits: AnswerLimits, decoder_start: int
) -> Questions:
    most = min(limits.most, limits.seq_len)
    items = [
        # --seq-len is checked, or with --truncate cut at the end, as in training
        Question(pair.where, row.tokens[: limits.seq_len], pair.references, most)
        for pair, row in zip(pairs, encode_sources(tokenizer, pairs), strict=True)
    ]
    return Questions(items, start=[decoder_start, *target_prefix(tokenizer)])


def _of_chats(tokenizer: Tokenizer, chats: Sequence[Chat], limits: AnswerLimits) -> Questions:
    """Questions of chats, for the last answer of each."""
    items, ends = [], set[int]()
    for chat, (prompt, answer, closing) in zip(chats, last_answers(tokenizer, chats), strict=True):
        tokens, answer_tokens, after = (
            encode(tokenizer, [text], special=False)[0] for text in (prompt, answer, closing)
        )
        items.append(limits.fit(chat.where, tokens, (answer,), len(answer_tokens) + 1))
        # the token that ends a turn, unless the template ends it with text
        if after and after[0] in tokenizer.added_tokens_decoder:
            ends.add(after[0])
    return Questions(items, frozenset(ends))
