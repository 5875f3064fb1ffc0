"""Grammars that an answer must follow, with llguidance: which tokens may come next."""

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.serve.text import Codec

_log = logging.getLogger("overspill")
_SPACE = r"[ ]|\n[ \t]{0,16}"
"""Between the parts of JSON. A weak model may never end spaces that it need not end."""
_LONGEST = 65_536
"""Characters of a schema: compiling a longer one may take minutes."""
_KEPT = 16
"""Compiled schemas."""
_SPECIAL = b"\xff"  # begins tokens that are no text, in llguidance


class Grammar:
    """The state of one answer. Only `accept` changes it."""

    def __init__(self, matcher: Any) -> None:
        """`matcher` is an LLMatcher of llguidance."""
        self._matcher = matcher

    def mask_(self, logits_V: Tensor) -> None:
        """Sets the logits of tokens that may not come next to minus infinity, in place. If that
        cannot be computed, `accept` raises."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = torch.zeros(len(logits_V), dtype=torch.bool)
        bits = torch.from_numpy(np.unpackbits(packed, count=None, bitorder="little"))
        count = min(len(allowed), len(bits))
        allowed[:count] = bits[:count] != 0
        logits_V.masked_fill_(~allowed.to(logits_V.device), -torch.inf)

    def accept(self, token: int) -> None:
        """The token was chosen."""
        if not self._matcher.consume_token(token):
            reason = _reason(self._matcher)
            raise ConfigError(
                f"the json_schema cannot be followed any further ({reason}); give a simpler one"
            )

    @property
    def is_complete(self) -> bool:
        """Whether nothing may come next."""
        return bool(self._matcher.is_stopped())


class Grammars:
    """Makes grammars for one model."""

    def __init__(self, codec: Codec | None, ends: Collection[int], vocabulary: int) -> None:
        self._codec = codec
        self._ends = sorted(end for end in ends if 0 <= end < vocabulary)
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # guards the next
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # the last ones that were used

    def from_schema(self, schema: str) -> Grammar:
        """For answers that are JSON of this schema. Compiling takes a second for hundreds of
        properties: several answers of a request, and later ones, get a copy."""
        with self._lock:
            matcher = self._compiled.pop(schema, None)
            if matcher is None:
                matcher = self._compile(schema)
            self._compiled[schema] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return Grammar(matcher.deep_copy())

    def _compile(self, schema: str) -> Any:
        if len(schema) > _LONGEST:
            raise ConfigError(
                f"json_schema has {len(schema)} characters; give one with at most {_LONGEST}"
            )
        library, tokenizer = _llguidance(), self._tokenizer
        try:
            source = library.LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": _SPACE}
            )
        except ValueError as error:
            raise ConfigError(f"json_schema cannot be used: {error}") from error
        matcher = library.LLMatcher(tokenizer, source, log_level=0)
        matcher.compute_bitmask()  # some schemas fail here; and the first token need not wait
        if matcher.is_error():
            raise ConfigError(f"json_schema cannot be used: {_reason(matcher)}")
        return matcher

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """It takes a second for a large vocabulary."""
        if self._codec is None:
            raise ConfigError("this model has no tokenizer; a json_schema needs one")
        if self._codec.library is not None and self._ends:
            try:
                return _from_library(self._codec.library, self._ends, self._vocabulary)
            except ValueError as error:  # some kinds are unknown to llguidance
                _log.info("llguidance reads this tokenizer as bytes: %s", error)
        return _from_bytes(self._codec, self._ends, self._vocabulary)


def _from_library(library: Any, ends: Sequence[int], vocabulary: int) -> Any:
    from tokenizers import Tokenizer

    own: Any = Tokenizer.from_str(library.to_str())
    own.no_padding()
    own.no_truncation()
    ids = max(own.get_vocab(with_added_tokens=True).values(), default=0) + 1
    return _llguidance().LLTokenizer(
        own.to_str(), n_vocab=max(ids, vocabulary), eos_token=list(ends)
    )


class _Bytes:
    """Tokens as bytes, in the form that llguidance reads. The last one ends the text if no token of
    the model does."""

    def __init__(self, codec: Codec, ends: Sequence[int], vocabulary: int) -> None:
        self._codec = codec
        self.tokens = [codec.token_bytes(token) for token in range(vocabulary)]
        self.tokens.append(b"<end>")
        self.special_token_ids = sorted({*_special_tokens(codec, vocabulary), *ends, vocabulary})
        for token in self.special_token_ids:
            self.tokens[token] = _SPECIAL + b"<%d>" % token
        self.eos_token_id = ends[0] if ends else vocabulary
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return self._codec.encode(text.decode() if isinstance(text, bytes) else text)


def _special_tokens(codec: Codec, vocabulary: int) -> list[int]:
    """Those that are left out of the text."""
    if codec.library is None:
        return []
    added = codec.library.get_added_tokens_decoder()
    return [number for number, token in added.items() if token.special and number < vocabulary]


def _from_bytes(codec: Codec, ends: Sequence[int], vocabulary: int) -> Any:
    library = _llguidance()
    made = _Bytes(codec, ends, vocabulary)
    return library.LLTokenizer(
        library.TokenizerWrapper(made), eos_token=list(ends) or made.eos_token_id
    )


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "json_schema needs llguidance, which is not installed; run pip install '.[serve]' in "
            "the checkout of Overspill"
        ) from error
    return llguidance


def _reason(matcher: Any) -> str:
    """Why a matcher has failed, in one line."""
    first = (matcher.get_error().strip().splitlines() or ["unknown reason"])[0]
    return "no token of this model may follow" if first == "NoExtensionBias" else first
