"""A conversation with a model."""

from collections.abc import Generator
from typing import TYPE_CHECKING

from overspill.core.errors import ConfigError
from overspill.serve.params import SamplingParams

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from overspill.serve.llm import LLM


class Chat:
    """Questions and answers so far. If they no longer fit into the context, the oldest ones are
    left out, but not the system message."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, str]] = []
        """The messages of user and assistant."""

    def ask(self, question: str) -> Generator[str, None, None]:
        """The answer, piece by piece. What was given out when the caller stops reading belongs to
        the conversation; after an error neither question nor answer does."""
        before = list(self.turns)
        self.turns.append({"role": "user", "content": question})
        answer = ""
        try:
            for piece in self._llm.stream(self._prompt(), self._params):
                answer += piece.text
                yield piece.text
        except Exception:
            self.turns = before
            raise
        finally:
            if len(self.turns) > len(before):
                self.turns.append({"role": "assistant", "content": answer})

    def forget(self) -> None:
        self.turns = []

    def _prompt(self) -> list[int]:
        """The longest end of the conversation that leaves room for an answer."""
        room = max(1, self._llm.context - min(self._params.max_tokens, self._llm.context // 2))
        first = 0
        while True:
            tokens = self._llm.chat_tokens([*self._system, *self.turns[first:]])
            if len(tokens) <= room:
                return tokens
            if first + 2 >= len(self.turns):
                raise ConfigError(
                    f"the question has {len(tokens)} tokens, the context of {self._llm.context} "
                    f"has room for {room} beside an answer; shorten it, or raise --context"
                )
            first += 2
