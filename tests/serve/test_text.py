"""Text piece by piece: joined, the pieces are the whole text up to a stop string."""

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from overspill.serve.text import Codec, LengthBound, TextStream, TransformersCodec
from overspill.train.tokenizer import ByteTokenizer
from overspill.train.trained import RunCodec

BYTES = RunCodec(ByteTokenizer())


def wrapped(tokenizer: Tokenizer) -> TransformersCodec:
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    return TransformersCodec(fast)


@functools.cache
def byte_level() -> TransformersCodec:
    """Byte pairs: some tokens hold parts of several characters."""
    byte_of = bytes_to_letters()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = [b"a", "€".encode(), "😀".encode(), "é".encode()]
    merges = [tuple(byte_of[b] for b in part[:2]) for part in parts if len(part) > 1]
    merges.append((byte_of[ord("b")], byte_of["€".encode()[0]]))  # a letter, and a third of another
    tokens = [*letters, *("".join(pair) for pair in merges), "<end>"]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer)


def bytes_to_letters() -> dict[int, str]:
    """The letter of each byte in byte-level tokenizers."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + n) for n, b in enumerate(others)}


@functools.cache
def words() -> TransformersCodec:
    """Words with a space before them, which a text does not begin with."""
    tokens = ["<unk>", "▁", "▁a", "▁be", "b", "c", ".", "▁▁", "<end>"]
    tokenizer = Tokenizer(models.WordLevel({t: n for n, t in enumerate(tokens)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return wrapped(tokenizer)


CODECS = {"bytes": (lambda: BYTES, 300), "byte level": (byte_level, 260), "words": (words, 9)}


def stream_of(codec: Codec | None, tokens: list[int], *stops: str) -> tuple[list[str], bool]:
    """The pieces of a text, and whether a stop string ended it."""
    stream, pieces = TextStream(codec, stops), []
    for token in tokens:
        piece, stopped = stream.add(token)
        pieces.append(piece)
        if stopped:
            break
    else:
        piece, stopped = stream.end()
        pieces.append(piece)
    assert stream.text == "".join(pieces)
    return pieces, stopped


@given(st.text("aé€😀\ufffd ", max_size=12))
@pytest.mark.parametrize("codec", ["bytes", "byte level"])
def test_pieces_are_the_text_whatever_its_characters(codec: str, text: str) -> None:
    made = CODECS[codec][0]()
    pieces, _ = stream_of(made, made.encode(text))
    assert "".join(pieces) == text


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_pieces_are_the_decoded_whole_for_any_tokens(codec: str, data: st.DataObject) -> None:
    """Also for bytes that are no text, and with tokens that have none."""
    make, n_tokens = CODECS[codec]
    tokens = data.draw(st.lists(st.integers(0, n_tokens - 1), max_size=16))
    pieces, _ = stream_of(make(), tokens)
    assert "".join(pieces) == make().decode(tokens)


@given(st.binary(max_size=16))
def test_pieces_are_the_decoded_whole_for_any_bytes(content: bytes) -> None:
    pieces, _ = stream_of(BYTES, list(content))
    assert "".join(pieces) == content.decode(errors="replace")


@given(st.text("aé€😀", max_size=8))
def test_a_character_appears_with_its_last_byte_and_never_in_part(text: str) -> None:
    content = text.encode()
    pieces, _ = stream_of(BYTES, list(content))
    for end in range(1, len(content) + 1):
        assert "".join(pieces[:end]) == content[:end].decode(errors="ignore")


@given(
    st.text("abc€", max_size=20),
    st.lists(st.text("abc€", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_ends_before_the_first_complete_stop_string(text: str, stops: list[str]) -> None:
    """As if each character were compared."""
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stops)]
    expected = text
    if ends:
        expected = min((text[: ends[0]].removesuffix(stop) for stop in stops), key=len)
    pieces, stopped = stream_of(BYTES, BYTES.encode(text), *stops)
    assert "".join(pieces) == expected
    assert stopped == bool(ends)


@given(st.data())
def test_no_part_of_a_stop_string_is_shown_with_tokens_of_several_characters(
    data: st.DataObject,
) -> None:
    codec = words()
    tokens = data.draw(st.lists(st.integers(1, 7), max_size=12))
    stops = data.draw(st.lists(st.text(" abe.", min_size=1, max_size=4), min_size=1, max_size=2))
    pieces, stopped = stream_of(codec, tokens, *stops)
    shown, whole = "".join(pieces), codec.decode(tokens)
    assert whole.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert stopped == any(stop in whole for stop in stops)
    assert shown == whole or any(whole[len(shown) :].startswith(stop) for stop in stops)


def test_what_may_begin_a_stop_string_comes_when_it_does_not() -> None:
    stream = TextStream(BYTES, ["</end>"])
    given_out = [stream.add(token)[0] for token in b"x</ex"]
    assert given_out == ["x", "", "", "", "</ex"]
    assert [stream.add(token)[0] for token in b"</"] == ["", ""]
    assert stream.end() == ("</", False)


def test_a_stop_string_before_half_a_character_is_found() -> None:
    """Both are in one token, and the character never ends."""
    codec = byte_level()
    tokens = codec.tokenizer.convert_tokens_to_ids(["a", "b" + bytes_to_letters()[0xE2]])
    assert stream_of(codec, tokens, "ab") == (["", "", ""], True)


@given(st.text(max_size=300))
def test_the_bound_of_a_length_is_never_above_it(text: str) -> None:
    bound = LengthBound(byte_level())
    assert bound.least(text) <= len(byte_level().encode(text))
    assert LengthBound(words()).least(text) == 0  # it has one token for unknown words
    assert LengthBound(None).least(text) == 0


def test_a_long_text_has_a_bound() -> None:
    assert LengthBound(byte_level()).least("a" * 50_000) >= 10_000


def test_without_a_codec_there_is_no_text() -> None:
    assert stream_of(None, [1, 2, 3]) == (["", "", "", ""], False)
