import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from overspill.core.errors import ConfigError
from overspill.models.presets import get_preset
from overspill.train.export_tokenizer import byte_tokenizer, tokenizer_files
from overspill.train.tokenizer import ByteTokenizer

MINE, LIBRARY = ByteTokenizer(), byte_tokenizer()
# of one, two or three, and three or four bytes; st.text() first makes a table of Unicode, which
# takes three seconds
CHARACTERS = st.integers(0, 0x7F) | st.integers(0x80, 0xD7FF) | st.integers(0xE000, 0x10FFFF)


def word_tokenizer(folder: Path, *words: str) -> Path:
    library = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@given(st.lists(CHARACTERS.map(chr)).map("".join))
def test_ids_are_the_bytes_and_decode_to_the_text(text: str) -> None:
    ids = LIBRARY.encode(text).ids
    assert ids == MINE.encode(text).tolist()
    assert LIBRARY.decode(ids) == text


@given(st.lists(st.integers(0, 256)))
def test_any_ids_decode_alike(ids: list[int]) -> None:
    assert LIBRARY.decode(ids) == MINE.decode(ids)


def test_the_alphabet_is_the_librarys() -> None:
    assert set(LIBRARY.get_vocab()) == {*pre_tokenizers.ByteLevel.alphabet(), "<|endoftext|>"}
    assert LIBRARY.get_vocab_size() == MINE.ids
    assert LIBRARY.token_to_id("<|endoftext|>") == MINE.separator


def test_a_tokenizer_json_is_copied_with_its_separator(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path, "?", "a", "</s>")
    for name in (str(path), str(tmp_path)):
        files = tokenizer_files(name, get_preset("nano"))
        assert files.tokenizer == path.read_text()
        assert files.separator == 2
        assert files.config["eos_token"] == files.config["pad_token"] == "</s>"


def test_a_tokenizer_without_separator_ends_nothing(tmp_path: Path) -> None:
    files = tokenizer_files(str(word_tokenizer(tmp_path, "?", "a")), get_preset("nano"))
    assert files.separator is None
    assert files.config["eos_token"] is None
    assert json.loads(files.tokenizer)["model"]["vocab"] == {"?": 0, "a": 1}


def test_a_tokenizer_that_is_too_large_is_another_one(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path, *(str(i) for i in range(300)))
    with pytest.raises(ConfigError, match="has 300 tokens and the model only 264"):
        tokenizer_files(str(path), get_preset("nano"))
