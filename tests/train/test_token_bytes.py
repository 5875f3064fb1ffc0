"""The bytes of tokens: those of a text together are its UTF-8."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from overspill.train.token_bytes import TokenBytes
from overspill.train.tokenizer import ByteTokenizer, load_tokenizer
from tests.serve.test_text import byte_level, words

TEXT = "aé€😀 b"


def sentencepiece() -> Tokenizer:
    """Single bytes for unknown characters, as in Llama 2."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁b", "é"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model: Any = models.BPE(vocabulary, [("▁", "b")], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


@pytest.mark.parametrize("make", [sentencepiece, lambda: byte_level().library])
def test_the_bytes_of_a_text_are_its_utf8(make: Any) -> None:
    library = make()
    of = TokenBytes(library).of
    ids = library.encode(TEXT, add_special_tokens=False).ids
    assert len(ids) > len(TEXT), "some characters are several tokens"
    assert b"".join(map(of, ids)).decode() == TEXT


def test_words_have_their_space() -> None:
    assert [words().token_bytes(token) for token in (2, 4, 6)] == [b" a", b"b", b"."]


def test_special_tokens_are_written_as_they_are() -> None:
    library = sentencepiece()
    of = TokenBytes(library).of
    assert of(library.token_to_id("</s>")) == b"</s>"
    assert of(library.token_to_id("</s>") + 1) == b"", "there is no such token"
    assert byte_level().token_bytes(byte_level().tokenizer.eos_token_id) == b"<end>"


def test_tokenizers_of_runs_know_their_bytes(tmp_path: Path) -> None:
    assert [ByteTokenizer().token_bytes(token) for token in (65, 255, 256)] == [b"A", b"\xff", b""]
    sentencepiece().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    ids = [int(token) for token in tokenizer.encode(TEXT)]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == TEXT
