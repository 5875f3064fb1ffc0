"""The answers of one HTTP request: what the engine computes for it, as the event loop sees it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overspill.core.errors import ConfigError
from overspill.serve.params import Piece, Result, SamplingParams
from overspill.server.bridge import Bridge
from overspill.server.errors import draining, failed

if TYPE_CHECKING:
    from overspill.serve.background import Submission
    from overspill.serve.llm import LLM


@dataclass(frozen=True)
class Job:
    """One answer that is asked for."""

    prompt: list[int]
    params: SamplingParams


@dataclass
class Times:
    """When something happened to an answer, by `time.perf_counter`."""

    first: float | None = None
    last: float = 0.0
    tokens: int = 0

    def count(self, piece: Piece) -> None:
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
        self.tokens += len(piece.token_ids)


class Answers:
    """The answers of one request, which are computed together and cancelled together."""

    def __init__(
        self, bridge: Bridge, jobs: Sequence[Job], stream: bool, count: Callable[[int], None]
    ) -> None:
        """Without `stream` only the ends of answers are delivered: nothing else is needed. `count`
        gets the number of tokens of each piece."""
        self._bridge = bridge
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

    def __len__(self) -> int:
        return len(self._jobs)

    def start(self, llm: "LLM") -> None:
        """Submits all; may be called in another thread. If one is refused, none is computed."""
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
                self._bridge.put(lambda: self._deliver(index, piece))

        return receive

    def _deliver(self, index: int, piece: Piece) -> None:
        self._ready.append((index, piece))
        self._wake.set()

    async def pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """All pieces since the last time, with the numbers of their answers, until the answers are
        complete or cancelled; none after `nudge`. Raises an error if the engine does."""
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
        """Lets `pieces` give what there is, even if that is nothing."""
        self._wake.set()

    def results(self) -> list[Result]:
        """Of answers that are complete."""
        return [submission.result() for submission in self._submissions]

    def disconnect(self) -> None:
        """The client has gone."""
        self.disconnected = True
        self.cancel()

    def cancel(self) -> None:
        """Frees what the answers hold; nothing is delivered any more."""
        self._cancelled = True
        self._cancel_all()
        self._wake.set()

    def _cancel_all(self) -> None:
        for submission in list(self._submissions):
            submission.cancel()
