"""The base class of the two forms of responses: completions and chats."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from overspill.serve.params import Piece, Result, Usage
from overspill.server.events import event


def usage_of(results: Sequence[Result], samples: int) -> Usage:
    """Return the tokens of a request. Each prompt counts once for its `samples` answers, which
    follow each other in `results`."""
    prompts = results[::samples]
    return Usage(
        sum(result.prompt_tokens for result in prompts),
        sum(len(result.token_ids) for result in results),
        sum(result.cached_tokens for result in prompts),
    )


def _usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.new_tokens,
        "total_tokens": usage.prompt_tokens + usage.new_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Form(ABC):
    """Form of a response: writes pieces and results of the engine as JSON for a client."""

    def __init__(self, kind: str, prefix: str, model: str, with_usage: bool) -> None:
        """`kind` is the `object` of an event, `prefix` begins the id; `with_usage` adds a last
        event with the number of tokens."""
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._kind = kind
        self._with_usage = with_usage
        # Most events differ in their text only: what is the same in all is encoded once.
        head = json.dumps(self._head(kind), separators=(",", ":"))
        self._begin = f'data: {head[:-1]},"choices":['
        self._end = "]" + (',"usage":null' if with_usage else "") + "}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "system_fingerprint": None}

    def opening(self) -> bytes:
        """Return the events before the first piece."""
        return b""

    @abstractmethod
    def events(self, index: int, piece: Piece) -> bytes:
        """Return the events of a piece of answer `index`."""

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the last piece."""
        if not self._with_usage:
            return b""
        return event({**self._head(self._kind), "choices": [], "usage": _usage_body(usage)})

    def _event(self, choice: str) -> bytes:
        """Return an event with one choice, which is encoded already."""
        return (self._begin + choice + self._end).encode()

    def body(self, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
        """Return the body of a complete response."""
        choices = [self.choice(index, result) for index, result in enumerate(results)]
        head = self._head(self._kind.removesuffix(".chunk"))
        return {**head, "choices": choices, "usage": _usage_body(usage)}

    @abstractmethod
    def choice(self, index: int, result: Result) -> dict[str, Any]:
        """Return a complete answer as an item of `choices`."""
