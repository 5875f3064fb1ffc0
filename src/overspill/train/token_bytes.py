"""The bytes of each token of a `tokenizer.json`."""

import functools
import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of the tokens of a tokenizer.

    Tokens may be parts of characters, whose text cannot be shown. Byte-level tokenizers write each
    byte as a printable character; SentencePiece writes single bytes as `<0x0A>`, and spaces as `▁`.
    """

    def __init__(self, library: Any) -> None:
        """`library` is a tokenizer of the `tokenizers` library."""
        self._library = library

    @functools.cached_property
    def _added(self) -> dict[int, str]:
        """Text of the tokens that are added to the vocabulary, such as special tokens."""
        added = self._library.get_added_tokens_decoder()
        return {number: str(token.content) for number, token in added.items()}

    @functools.cached_property
    def _kinds(self) -> str:
        """The description of the decoder, as JSON."""
        return json.dumps(json.loads(self._library.to_str()).get("decoder"), ensure_ascii=False)

    def of(self, token: int) -> bytes:
        """The bytes of a token; none if there is no such token."""
        if token in self._added:
            return self._added[token].encode()
        written = self._library.id_to_token(token)
        if written is None:
            return b""
        if '"ByteLevel"' in self._kinds:
            if all(character in _BYTES for character in written):
                return bytes(_BYTES[character] for character in written)
            return str(written).encode()
        found = _BYTE.fullmatch(written) if '"ByteFallback"' in self._kinds else None
        if found is not None:
            return bytes([int(found[1], 16)])
        if "▁" in self._kinds:
            return str(written).replace("▁", " ").encode()
        return str(self._library.decode([token], skip_special_tokens=False)).encode()


def byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers represent each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}
