from pathlib import Path

import pytest

from overspill.core.errors import ConfigError
from overspill.train.tokenizer import load_tokenizer, vocab_size


def test_bytes_come_back_as_they_went() -> None:
    tokenizer = load_tokenizer("bytes")
    text = "def f(x):\n\treturn 'é€😀'\n"
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens.tolist()) == text


def test_the_byte_vocabulary_has_a_separator_and_whole_tiles() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.separator == 256
    assert vocab_size(tokenizer) == 320


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"[UNK]": 0, "an": 1, "expert": 2, "spills": 3, "</s>": 70}
    library = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    library.pre_tokenizer = Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_any_tokenizer_json_can_be_used(tokenizer_json: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_json))
    assert tokenizer.encode("an expert spills").tolist() == [1, 2, 3]
    assert tokenizer.separator == 70
    assert tokenizer.ids == 71  # the highest id counts, not the number of words
    assert vocab_size(tokenizer) == 128
    assert load_tokenizer(str(tokenizer_json.parent)).fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("content", [b"not json", b'{"a": 1}', b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--tokenizer .*tokenizer\.json is not"):
        load_tokenizer(str(path))


def test_a_missing_tokenizer_is_named() -> None:
    with pytest.raises(ConfigError, match="--tokenizer /no/such/file cannot be read"):
        load_tokenizer("/no/such/file")
