"""A conversation with a model."""

from collections.abc import Generator
from typing import TYPE_CHECKING

from overspill.core.errors import ConfigError
from overspill.serve.params import Piece, SamplingParams

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from overspill.serve.llm import LLM


class QuestionTooLong(ConfigError):
    """A question does not fit into the context, even without earlier messages."""


class Chat:
    """Conversation of questions and answers. If it no longer fits into the context, the oldest
    messages are left out, but not the system message."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None = None) -> None:
        llm.check_chats()
        self._llm = llm
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.forget()

    def forget(self) -> None:
        self.turns: list[dict[str, str]] = []
        """The messages of user and assistant."""
        self.left_out = 0
        """Number of messages, from the first on, that the model no longer gets. They stay left out,
        so that the keys and values of the others are found in the cache."""
        self.used_tokens = 0
        """Number of tokens of the last prompt with its answer."""

    @property
    def is_full(self) -> bool:
        """Whether the last answer has ended because the context had no more room."""
        return self.used_tokens >= self._llm.context

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """Yield the answer piece by piece. If the caller stops reading, the pieces so far belong to
        the conversation; after an error, or without a piece, the question does not."""
        before = list(self.turns), self.left_out
        self.turns.append({"role": "user", "content": question})
        answer, ended = "", False
        try:
            prompt = self._prompt()
            self.used_tokens = len(prompt)
            for piece in self._llm.stream(prompt, self._params):
                answer += piece.text
                self.used_tokens += len(piece.token_ids)
                yield piece
            ended = True
        except Exception:
            answer = ""
            raise
        finally:
            if answer or ended:
                self.turns.append({"role": "assistant", "content": answer})
            else:
                self.turns, self.left_out = before

    def _prompt(self) -> list[int]:
        """Return the tokens of the longest end of the conversation that leaves room for an
        answer."""
        room = max(1, self._llm.context - min(self._params.max_tokens, self._llm.context // 2))
        while True:
            tokens = self._llm.chat_tokens([*self._system, *self.turns[self.left_out :]])
            if len(tokens) <= room:
                return tokens
            if self.left_out + 2 >= len(self.turns):
                asked = "the question and the system message have" if self._system else (
                    "the question has"
                )  # fmt: skip
                raise QuestionTooLong(
                    f"{asked} {len(tokens)} tokens, the context of {self._llm.context} has room "
                    f"for {room} beside an answer; shorten it, or raise --context"
                )
            self.left_out += 2
