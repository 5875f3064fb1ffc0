"""Tokenizers: bytes by default, or any `tokenizer.json`."""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from overspill.core.errors import ConfigError
from overspill.core.sizes import round_up
from overspill.train.token_bytes import TokenBytes

Tokens = npt.NDArray[np.unsignedinteger[Any]]

# Matrix kernels are faster on whole tiles; the additional ids are never used.
VOCAB_MULTIPLE = 64


class Tokenizer(Protocol):
    """A tokenizer for training data."""

    name: str
    fingerprint: str
    """Identifies the mapping from text to ids."""
    ids: int
    """Number of distinct ids."""
    separator: int | None
    """The id between documents, if any."""
    library: Any
    """The tokenizer of the `tokenizers` library that it wraps; None if there is none."""

    def encode(self, text: str) -> Tokens: ...

    def decode(self, tokens: list[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class ByteTokenizer:
    """Tokenizer into the UTF-8 bytes of the text, and one id that separates documents."""

    name = "bytes"
    fingerprint = "bytes-1"
    ids = 257
    separator: int | None = 256
    library: Any = None

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


class JsonTokenizer:
    """A `tokenizer.json`, read by the Hugging Face `tokenizers` library."""

    _SEPARATORS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        try:
            content = path.read_bytes()
            self.library: Any = Library.from_str(content.decode("utf-8"))
        except OSError as error:
            raise ConfigError(
                f"--tokenizer {path} cannot be read ({error.strerror}); give the path of a "
                "tokenizer.json, or `bytes`"
            ) from error
        except Exception as error:  # the library raises Exception for a file that it cannot parse
            raise ConfigError(
                f"--tokenizer {path} is not a tokenizer.json ({error}); give one, or `bytes`"
            ) from error
        self.name = str(path)
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
        # Ids need not be dense: the vocabulary must include the highest one.
        self.ids = max(self.library.get_vocab(with_added_tokens=True).values()) + 1
        found = (self.library.token_to_id(token) for token in self._SEPARATORS)
        self.separator: int | None = next((token for token in found if token is not None), None)
        self._bytes = TokenBytes(self.library)

    def encode(self, text: str) -> Tokens:
        ids = self.library.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.uint32)

    def decode(self, tokens: list[int]) -> str:
        return str(self.library.decode(tokens))

    def token_bytes(self, token: int) -> bytes:
        return self._bytes.of(token)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json or of the folder that holds one."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    return JsonTokenizer(path / "tokenizer.json" if path.is_dir() else path)


def vocab_size(tokenizer: Tokenizer) -> int:
    """The default vocabulary size of a model for this tokenizer."""
    return round_up(tokenizer.ids, VOCAB_MULTIPLE)
