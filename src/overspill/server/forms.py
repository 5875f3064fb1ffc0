"""What the forms of both kinds of answers have in common."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from overspill.serve.params import Piece, Result
from overspill.server.events import event
from overspill.server.usage import Usage


class Form(ABC):
    """How the pieces and results of the engine are written for a client."""

    def __init__(self, kind: str, prefix: str, model: str, with_usage: bool) -> None:
        """`kind` is the `object` of an event, `prefix` begins the id; `with_usage` adds a last
        event with the usage."""
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
        """Events before the first piece."""
        return b""

    @abstractmethod
    def events(self, index: int, piece: Piece) -> bytes:
        """The events of a piece of answer `index`."""

    def closing(self, usage: Usage) -> bytes:
        """Events after the last piece."""
        if not self._with_usage:
            return b""
        return event({**self._head(self._kind), "choices": [], "usage": usage.body()})

    def _event(self, choice: str) -> bytes:
        """An event with one choice, which is encoded already."""
        return (self._begin + choice + self._end).encode()

    def body(self, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        choices = [self.choice(index, result) for index, result in enumerate(results)]
        head = self._head(self._kind.removesuffix(".chunk"))
        return {**head, "choices": choices, "usage": usage.body()}

    @abstractmethod
    def choice(self, index: int, result: Result) -> dict[str, Any]:
        """One answer that is complete."""
