"""Grammars that an answer must follow, with llguidance: the tokens that may come next."""

import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from overspill.core.errors import ConfigError, OrderError
from overspill.serve.schema_process import Attempt, PassingError, SchemaProcess, first_line
from overspill.serve.text import Codec

_log = logging.getLogger("overspill")
_KEPT = 16
"""Compiled schemas that are kept without a request, with schemas that cannot be compiled."""
_AT_ONCE = 8
"""Schemas that are compiled at the same time."""
_MOST_STATES = 100_000
"""States of the table of texts that were possible while answers follow a schema; each takes a
kilobyte."""
_WORN_SECONDS = 1.0
"""Seconds spent on masks after which a schema gets a new table."""
_SPECIAL = b"\xff"  # begins tokens that are no text, in llguidance


class Grammar:
    """Grammar of one answer, and its state after the tokens so far. Only `accept` changes it."""

    def __init__(self, compiled: "_Compiled") -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()

    def mask_(self, logits_V: Tensor) -> None:
        """Set the logits of tokens that may not come next to minus infinity, in place. If they
        cannot be computed, `accept` raises."""
        began = time.perf_counter()
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._compiled.used_seconds += time.perf_counter() - began
        allowed = torch.zeros(len(logits_V), dtype=torch.bool)
        bits = torch.from_numpy(np.unpackbits(packed, count=None, bitorder="little"))
        count = min(len(allowed), len(bits))
        allowed[:count] = bits[:count] != 0
        logits_V.masked_fill_(~allowed.to(logits_V.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Follow a token that was chosen."""
        if not self._matcher.consume_token(token):
            self._compiled.has_failed = True
            raise ConfigError(
                "the json_schema cannot be followed any further "
                f"({_reason(self._matcher)}); give a simpler one"
            )

    @property
    def is_complete(self) -> bool:
        """Whether no token may come next."""
        return bool(self._matcher.is_stopped())


@dataclass
class _Compiled:
    """Schema as a matcher. Copies of the matcher share a table of the texts that were possible so
    far, which only grows; they fail together when it is full."""

    matcher: Any
    """An LLMatcher of llguidance at its beginning."""
    seconds: float
    """Time that compiling took."""
    used_seconds: float = 0.0
    """Time that masks of copies took."""
    has_failed: bool = False

    @property
    def is_worn(self) -> bool:
        """Whether later answers should have a new table. Masks take long only while it grows."""
        return self.has_failed or self.used_seconds > _WORN_SECONDS + 10 * self.seconds


@dataclass
class _Entry:
    attempt: Attempt
    outcome: "Future[_Compiled | str]"
    """The compiled schema, or the reason why it cannot be compiled."""
    holders: int = 0


def _is_worn(entry: _Entry) -> bool:
    outcome = entry.outcome
    if entry.holders or not outcome.done() or outcome.cancelled() or outcome.exception():
        return False
    compiled = outcome.result()
    return isinstance(compiled, _Compiled) and compiled.is_worn


class Compilation:
    """Context in which a schema is compiled and stays compiled. Leaving it earlier cancels the
    compilation. Any thread may use it."""

    def __init__(self, entry: _Entry, release: Callable[[], None]) -> None:
        self._entry = entry
        self._release = release

    def when_done(self, call: Callable[[], None]) -> None:
        """Call a function, perhaps in another thread, when the compilation has ended."""
        self._entry.outcome.add_done_callback(lambda _: call())

    @property
    def done(self) -> bool:
        return self._entry.outcome.done()

    def check(self) -> None:
        """Wait for the end of the compilation; raises if it has failed."""
        self._result()

    def grammar(self) -> Grammar:
        """Wait for the end of the compilation, and return a grammar for one answer."""
        return Grammar(self._result())

    def _result(self) -> _Compiled:
        try:
            outcome = self._entry.outcome.result()
        except CancelledError:
            raise OrderError("this LLM was closed; make a new one") from None
        if isinstance(outcome, str):
            raise ConfigError(outcome)
        return outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()


class Grammars:
    """Compiled schemas of one model. Compiling takes a tenth of a second for hundreds of
    properties: several answers of a request, and later requests, get copies."""

    def __init__(self, codec: Codec | None, ends: Collection[int], vocabulary: int) -> None:
        self._codec = codec
        self._ends = sorted(end for end in ends if 0 <= end < vocabulary)
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # guards the next two; nothing is compiled meanwhile
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the last ones that were used
        self._closed = False
        self._tokenizer_lock = threading.Lock()  # one thread reads the vocabulary
        self._process = SchemaProcess()
        self._threads = ThreadPoolExecutor(_AT_ONCE, "overspill-schema")

    def from_schema(self, schema: str) -> Grammar:
        """Return a grammar for an answer that is JSON of a schema."""
        with self.compile(schema) as compilation:
            return compilation.grammar()

    def compile(self, schema: str) -> Compilation:
        """Begin to compile a schema, if it is not compiled yet, and return at once."""
        if self._codec is None:
            raise ConfigError("this model has no tokenizer; a json_schema needs one")
        _llguidance()
        with self._lock:
            if self._closed:
                raise OrderError("this LLM was closed; make a new one")
            entry = self._entries.pop(schema, None)
            if entry is None or _is_worn(entry):
                attempt = Attempt()
                outcome = self._threads.submit(self._compile, schema, attempt)
                entry = _Entry(attempt, outcome)
            entry.holders += 1
            self._entries[schema] = entry
            self._forget()
        return Compilation(entry, functools.partial(self._release, schema, entry))

    def _forget(self) -> None:
        """Forget schemas that no request uses, if they are too many or their tables are large. The
        caller holds the lock."""
        unused = [text for text, entry in self._entries.items() if not entry.holders]
        too_many = max(0, len(self._entries) - _KEPT)
        for number, text in enumerate(unused):
            if number < too_many or _is_worn(self._entries[text]):
                del self._entries[text]

    def _release(self, schema: str, entry: _Entry) -> None:
        with self._lock:
            entry.holders -= 1
            if entry.holders:
                return
            outcome = entry.outcome
            kept = outcome.done() and not outcome.cancelled() and outcome.exception() is None
            if not kept and self._entries.get(schema) is entry:
                del self._entries[schema]
        outcome.cancel()
        entry.attempt.cancel()

    def close(self) -> None:
        """Cancel all compilations."""
        with self._lock:
            self._closed = True
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            entry.outcome.cancel()
            entry.attempt.cancel()
        self._process.close()
        self._threads.shutdown()

    def _compile(self, schema: str, attempt: Attempt) -> _Compiled | str:
        """Compile a schema, in a thread of its own. Another process compiles first: only a schema
        within the limits is compiled here, too."""
        try:
            source = self._process.compile(schema, attempt)
            with self._tokenizer_lock:
                tokenizer = self._tokenizer
            library, began = _llguidance(), time.perf_counter()
            limits = library.LLParserLimits(max_lexer_states=_MOST_STATES)
            matcher = library.LLMatcher(tokenizer, source, log_level=0, limits=limits)
            matcher.compute_bitmask()  # some schemas fail here; and the first token need not wait
        except PassingError:
            raise  # it may be compiled later
        except ConfigError as error:
            return str(error)
        if matcher.is_error():
            return f"json_schema cannot be used: {_reason(matcher)}"
        return _Compiled(matcher, time.perf_counter() - began)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """The tokenizer for llguidance. Reading a large vocabulary takes a second."""
        assert self._codec is not None
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
    """Tokens as bytes, in the form that llguidance reads. The last token ends the text if no token
    of the model does."""

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
    """Return the tokens that are left out of the text."""
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
    """Return the reason why a matcher has failed, in one line."""
    first = first_line(matcher.get_error())
    return "no token of this model may follow" if first == "NoExtensionBias" else first
