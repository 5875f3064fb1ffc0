"""Tokens and labels one by one, against what a reader would write down."""

import numpy as np

from overspill.train.finetune.encoding import (
    encode_pairs,
    encode_prompts,
    encode_sources,
    encode_texts,
    separator,
)
from overspill.train.finetune.kinds import Pair, Text
from overspill.train.finetune.rows import IGNORED, Row
from tests.train.finetune.tiny import END, make_tokenizer

TOKENIZER = make_tokenizer()


def tokens(text: str) -> list[int]:
    """The bytes of a text as this tokenizer numbers them, and its end where there is a |."""
    parts = text.split("|")
    found: list[int] = []
    for number, part in enumerate(parts):
        found += [END] if number else []
        found += TOKENIZER(part, add_special_tokens=False)["input_ids"]
    return found


def check(row: Row, text: str, learned: str) -> None:
    """`learned` has a - under every token that is not learned."""
    assert row.tokens.tolist() == tokens(text)
    assert len(text) == len(learned)
    wanted = [
        IGNORED if mark == "-" else token for mark, token in zip(learned, tokens(text), strict=True)
    ]
    assert row.labels.tolist() == wanted


def test_all_of_a_text_is_learned() -> None:
    first, second = encode_texts(TOKENIZER, [Text("f:1", "abc"), Text("f:2", "d<end>")])
    check(first, "abc|", "abc|")
    check(second, "d|", "d|")  # an end that already exists is not doubled


def test_the_completion_is_learned_and_the_prompt_is_not() -> None:
    (row,) = encode_pairs(TOKENIZER, [Pair("f:1", "1+1=", "2")])
    check(row, "1+1=2|", "----2|")
    assert row.where == "f:1"


def test_an_encoder_decoder_gets_source_and_target() -> None:
    (row,) = encode_sources(TOKENIZER, [Pair("f:1", "ab", "c")])
    assert row.tokens.tolist() == tokens("ab")
    assert row.labels.tolist() == tokens("c|")


def test_what_a_tokenizer_adds_at_the_beginning_stays_and_at_the_end_goes() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    special = [("<pad>", tokenizer.pad_token_id), ("<end>", END)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <end>", special_tokens=special
    )
    assert encode_prompts(tokenizer, ["ab"]) == [[tokenizer.pad_token_id, *tokens("ab")]]
    (row,) = encode_pairs(tokenizer, [Pair("f:1", "ab", "c")])
    assert row.tokens.tolist() == [tokenizer.pad_token_id, *tokens("abc|")]
    (row,) = encode_texts(tokenizer, [Text("f:1", "ab")])
    assert row.tokens.tolist() == [tokenizer.pad_token_id, *tokens("ab|")]


def test_many_examples_keep_their_order() -> None:
    rows = list(encode_texts(TOKENIZER, [Text(str(n), str(n)) for n in range(2500)]))
    assert [row.where for row in rows] == [str(n) for n in range(2500)]
    assert TOKENIZER.decode(rows[2345].tokens[:-1]) == "2345"


def test_without_an_end_token_nothing_is_put_between() -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    assert np.array_equal(separator(tokenizer), [])
    assert separator(TOKENIZER).tolist() == [END]
