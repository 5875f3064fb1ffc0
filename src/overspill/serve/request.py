"""One request: its tokens, and how many of them have been computed."""

import queue
import secrets
import time
from collections.abc import Callable, Sequence

from overspill.models.huggingface.recurrent import States
from overspill.serve.params import Piece, Result, SamplingParams, Usage
from overspill.serve.rules import Rules
from overspill.serve.sampling import Draw
from overspill.serve.text import TextStream


class Request:
    """Prompt and the tokens that were generated for it. Only the serving loop changes it; `pieces`
    are for the thread that asked, if `deliver` does not take them."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        text: TextStream,
        max_tokens: int,
        rules: Rules | None = None,
        source: Sequence[int] = (),
    ) -> None:
        """`max_tokens` is that of `params`, or less if the context ends before. `source` is for the
        encoder of an encoder-decoder; the decoder then begins with the prompt."""
        self.source = list(source)
        self.source_blocks: list[int] = []
        self.source_computed = False
        """Whether the keys and values of the source are in the cache."""
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.params = params
        self.max_tokens = max_tokens
        self.computed = 0
        """Number of tokens whose keys and values are in the cache."""
        self.blocks: list[int] = []
        self.beginning: States | None = None
        """States after the tokens that were found in the cache, from which the request continues;
        None from its first pass on."""
        self.known = 0
        """Number of tokens whose blocks were found, with states or without: other requests begin
        with the same tokens."""
        self.checkpoints: dict[int, States] = {}
        """States that passes have copied, by the number of tokens they have seen."""
        self.cached_tokens: int | None = None
        """Number of prompt tokens that were found in the cache; None before the first batch."""
        self.logprobs: list[dict[int, float]] = []
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        self.deliver: Callable[[Piece], None] = self.pieces.put
        """Function that takes each piece, in the thread that computes; it must not raise."""
        self.asked_at = time.perf_counter()
        self.first_token_at: float | None = None
        self._seed = (secrets.randbits(63) if params.seed is None else params.seed) % (1 << 63)
        self._text = text
        self._rules = rules

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def has_answer(self) -> bool:
        """Whether tokens were generated."""
        return len(self.tokens) > self.prompt_tokens

    def draw(self, ahead: int = 0) -> Draw:
        """Return the inputs of the choice of the next token, or of one `ahead` tokens later."""
        adjust = None if self._rules is None else self._rules.adjust
        number = len(self.tokens) - self.prompt_tokens + ahead
        return Draw(self.params, self._seed, number, adjust)

    @property
    def pending(self) -> int:
        """Number of tokens that have to be computed before the next one can be chosen."""
        return self.pending_source + len(self.tokens) - self.computed

    @property
    def pending_source(self) -> int:
        """Number of source tokens that are computed with the first token after them."""
        return 0 if self.source_computed else len(self.source)

    @property
    def is_last(self) -> bool:
        """Whether the next token is the last one that was asked for."""
        return len(self.tokens) + 1 - self.prompt_tokens >= self.max_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def append(self, token: int, logprobs: dict[int, float] | None, end: bool) -> None:
        """Add the next token, and deliver its piece; `end` if it ends the text. Raises, and changes
        nothing, if the rules of the request cannot continue."""
        if self._rules is not None:
            self._rules.accept(token)
            complete = self._rules.is_complete
        else:
            complete = False
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        text, stopped = ("", False) if end else self._text.add(token)
        last = len(self.tokens) - self.prompt_tokens >= self.max_tokens
        if (end or complete or last) and not stopped:
            held, stopped = self._text.end()
            text += held
        if end or complete or stopped:
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = "length"
        logs = None if logprobs is None else [logprobs]
        self.deliver(Piece(text, [token], self.finish_reason, logs, self._text.stop))

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.deliver(Piece("", [], "error"))

    @property
    def usage(self) -> Usage:
        new = len(self.tokens) - self.prompt_tokens
        return Usage(self.asked_tokens, new, self.cached_tokens or 0)

    @property
    def asked_tokens(self) -> int:
        """Number of tokens that the user has given: of an encoder-decoder, those of the source."""
        return len(self.source) or self.prompt_tokens

    def result(self) -> Result:
        assert self.finish_reason is not None
        return Result(
            self._text.text,
            self.new_tokens,
            self.finish_reason,
            self.asked_tokens,
            self.logprobs if self.params.logprobs is not None else None,
            self._text.stop,
            self.cached_tokens or 0,
        )
