"""The answers of one HTTP request, from their submission to the engine to their last piece."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overspill.core.errors import ConfigError
from overspill.serve.params import Piece, Result, SamplingParams
from overspill.server.errors import draining, failed
from overspill.server.loop_queue import LoopQueue

if TYPE_CHECKING:
    from overspill.serve.background import Submission
    from overspill.serve.llm import LLM


@dataclass(frozen=True)
class Job:
    """Prompt and parameters of one answer."""

    prompt: list[int]
    params: SamplingParams


@dataclass
class Times:
    """Times of the first and the last token of an answer, by `time.perf_counter`."""

    first: float | None = None
    last: float = 0.0
    tokens: int = 0

    def count(self, piece: Piece) -> None:
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
        self.tokens += len(piece.token_ids)


class Answers:
    """Answers of one request, which are computed together and cancelled together."""

    def __init__(
        self, queue: LoopQueue, jobs: Sequence[Job], stream: bool, count: Callable[[int], None]
    ) -> None:
        """Without `stream` only the last piece of each answer is delivered. `count` is called with
        the number of tokens of each piece."""
        self._queue = queue
        self._jobs = jobs
        self._stream = stream
        self._count = count
        self._submissions: list[Submission] = []
        self._ready: list[tuple[int, Piece]] = []
        self._wake = asyncio.Event()
        self._open = len(jobs)
        self._cancelled = False
        self.disconnected = False
        self.asked_at = time.perf_counter()
        self.times = [Times() for _ in jobs]

    def start(self, llm: "LLM") -> None:
        """Submit all answers; may be called in another thread. If one is refused, none is
        computed."""
        try:
            for index, job in enumerate(self._jobs):
                self._submissions.append(
                    llm.submit(job.prompt, job.params, on_piece=self._receiver(index))
                )
                if self._cancelled:
                    break
        except BaseException:
            self._cancelled = True
            raise
        finally:
            # `cancel` sets the flag before it looks at submissions: either sees the other's change
            if self._cancelled:
                self._cancel_all()

    def _receiver(self, index: int) -> Callable[[Piece], None]:
        times, stream, count = self.times[index], self._stream, self._count

        def receive(piece: Piece) -> None:
            """Runs in the thread that computes: keep it short."""
            times.count(piece)
            count(len(piece.token_ids))
            if stream or piece.finish_reason is not None:
                self._queue.put(lambda: self._deliver(index, piece))

        return receive

    def _deliver(self, index: int, piece: Piece) -> None:
        self._ready.append((index, piece))
        self._wake.set()

    async def pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Yield all pieces since the last time, with the numbers of their answers, until the
        answers are complete or cancelled; an empty list after `nudge`. Raises errors of the
        engine."""
        while self._open and not self._cancelled:
            await self._wake.wait()
            self._wake.clear()
            ready, self._ready = self._ready, []
            for index, piece in ready:
                if piece.finish_reason == "error":
                    raise self._error(index)
                self._open -= piece.finish_reason is not None
            if not self._cancelled:
                yield ready
        if self._open and not self.disconnected:
            raise draining()

    def _error(self, index: int) -> Exception:
        cause = self._submissions[index].error
        if isinstance(cause, ConfigError):  # such as a schema that cannot be followed to its end
            return cause
        error = failed()
        error.__cause__ = cause
        return error

    def nudge(self) -> None:
        """Let `pieces` yield now, even if there is no piece."""
        self._wake.set()

    def results(self) -> list[Result]:
        """Return the results of answers that are complete."""
        return [submission.result() for submission in self._submissions]

    def disconnect(self) -> None:
        """Cancel the answers because the client has gone."""
        self.disconnected = True
        self.cancel()

    def cancel(self) -> None:
        """Free the memory of the answers; no piece is delivered any more."""
        self._cancelled = True
        self._cancel_all()
        self._wake.set()

    def _cancel_all(self) -> None:
        for submission in list(self._submissions):
            submission.cancel()
