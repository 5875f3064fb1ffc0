"""Text to tokens, and tokens to text piece by piece."""

import functools
import json
from collections.abc import Sequence
from typing import Any, Protocol

from overspill.core.errors import ConfigError
from overspill.train.token_bytes import TokenBytes, byte_characters

_INCOMPLETE = "\ufffd"  # a character whose bytes are not all there


class Codec(Protocol):
    """Tokenizer: text to tokens and back."""

    ends: frozenset[int]
    """Tokens that end a text."""
    library: Any
    """The tokenizer of the `tokenizers` library behind it; None if there is none."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        ...


def need_codec(codec: Codec | None) -> Codec:
    """Return the codec; raises if the model has none."""
    if codec is None:
        raise ConfigError("this model has no tokenizer; give token ids instead of text")
    return codec


def check_text(text: str) -> None:
    """Raise if a text has surrogates, as of bytes on a command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = text[error.start : error.start + 1]
        raise ConfigError(
            f"the text is not valid UTF-8: {bad!r} at character {error.start}; remove it"
        ) from error


class LengthBound:
    """Lower bound of the number of tokens of texts, without tokenizing them."""

    def __init__(self, codec: Codec | None) -> None:
        self._library: Any = getattr(codec, "library", None)

    def least(self, text: str) -> int:
        """Return a number of tokens that the text has at least; 0 if it is not known."""
        return 0 if self._longest is None else len(text) // self._longest

    @functools.cached_property
    def _longest(self) -> int | None:
        """The most characters of a text that one token stands for; None if there is no limit: some
        tokenizers drop characters, or have one token for all that they do not know."""
        if self._library is None:
            return None
        parts = json.loads(self._library.to_str())
        normalizers, splits = (_flat(parts[name]) for name in ("normalizer", "pre_tokenizer"))
        kinds = {each["type"] for each in normalizers if not _keeps_length(each)}
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if any(each["type"] == "ByteLevel" for each in splits):
            knows_all = vocabulary.keys() >= {*byte_characters()}
        else:
            knows_all = parts["model"].get("byte_fallback") is True
            knows_all &= vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
        keeps_all = (
            parts["model"]["type"] == "BPE"
            and knows_all
            and kinds <= {"NFC"}
            and {each["type"] for each in splits} <= {"ByteLevel", "Split", "Digits", "Metaspace"}
            and all(each.get("behavior") != "Removed" for each in splits)
            # these include the spaces beside them
            and not any(each["lstrip"] or each["rstrip"] for each in parts["added_tokens"])
        )
        if not keeps_all:
            return None
        longest = max(map(len, vocabulary))
        return longest * (4 if "NFC" in kinds else 1)  # NFC makes one character of at most 4


def _keeps_length(normalizer: Any) -> bool:
    """Return whether a normalizer makes no text shorter."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(normalizer["content"]) >= len(replaced)
    return bool(normalizer["type"] == "Prepend")


def _flat(part: Any) -> list[Any]:
    """Return a normalizer or pre-tokenizer of a tokenizer.json as the list of its parts."""
    if part is None:
        return []
    inner = part.get("normalizers") or part.get("pretokenizers")
    return [each for one in inner for each in _flat(one)] if inner else [part]


class TransformersCodec:
    """Tokenizer of transformers; special tokens are left out of the text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        end = tokenizer.eos_token_id
        self.ends = frozenset(() if end is None else (end,))
        self.library: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes = None if self.library is None else TokenBytes(self.library)

    def encode(self, text: str) -> list[int]:
        # verbose: the length is checked elsewhere
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def token_bytes(self, token: int) -> bytes:
        if self._bytes is not None:
            return self._bytes.of(token)
        return str(self.tokenizer.decode([token])).encode()

    def decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class TextStream:
    """Text of the tokens so far. Characters that may still change, or may begin a stop string, are
    held back until that is decided. Without a codec the text stays empty."""

    def __init__(self, codec: Codec | None, stops: Sequence[str] = ()) -> None:
        self.text = ""
        """All text that was given out."""
        self.stop: str | None = None
        """The stop string that ended the text."""
        self._decode = (lambda _: "") if codec is None else codec.decode
        self._stops = stops
        self._tokens: list[int] = []
        self._start = 0  # tokens before it do not change the text of later ones
        self._read = 0  # tokens whose text is in `text` or `_held`
        self._held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Return the new text, and whether a stop string ended it."""
        self._tokens.append(token)
        return self._give(self._decoded())

    def end(self) -> tuple[str, bool]:
        """Return the text that was held back, and whether a stop string ended it. No tokens
        follow."""
        text, stopped = self._give(self._decoded(final=True))
        held, self._held = self._held, ""
        self.text += held
        return text + held, stopped

    def _decoded(self, final: bool = False) -> str:
        """Return the text of new tokens, if their characters are complete. A token is decoded with
        the tokens before it: spaces between words belong to neither."""
        before = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _give(self, new: str) -> tuple[str, bool]:
        self._held += new
        places = ((self._held.find(stop), stop) for stop in self._stops)
        found = [place for place in places if place[0] >= 0]
        if found:
            at, self.stop = min(found)
            text, self._held = self._held[:at], ""
            self.text += text
            return text, True
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self.text += text
        return text, False


def overlap(text: str, marker: str) -> int:
    """Return the number of characters at the end of a text that may begin `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
