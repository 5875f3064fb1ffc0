"""Requests that come at the same time begin together."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from types import TracebackType
from typing import Self

Start = Callable[[], None]
_Waiting = tuple[Start, asyncio.Future[None]]


class Starts:
    """Gives requests to the engine. A prompt that comes a millisecond after others would wait until
    their batch has ended. So a request waits for those that are being tokenized, for a short time,
    and all are given to the engine one right after the other."""

    def __init__(self, threads: Executor, most: float = 0.01) -> None:
        """A request waits at most so many seconds for others."""
        self._threads = threads
        self._most = most
        self._coming = 0
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None

    def coming(self) -> "Coming":
        """A context from the arrival of a request to its start."""
        return Coming(self)

    def arrive(self) -> None:
        self._coming += 1

    def leave(self) -> None:
        """One that others have waited for has come, or never will."""
        self._coming -= 1
        if self._coming == 0:
            self._start_all()

    async def start(self, function: Start) -> None:
        """Calls the function in another thread, with those of others; raises what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append((function, future))
        if self._timer is None:
            self._timer = loop.call_later(self._most, self._start_all)
        self.leave()
        await future

    def _start_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        functions = [function for function, _ in waiting]
        futures = [future for _, future in waiting]
        try:
            loop = asyncio.get_running_loop()
            started = loop.run_in_executor(self._threads, _call_all, functions)
        except RuntimeError as error:  # the threads have ended
            _settle(futures, [error] * len(futures))
            return
        started.add_done_callback(lambda done: _settle(futures, _outcomes(done, len(futures))))


class Coming:
    """One request. It ends when it has started, or without that."""

    def __init__(self, starts: Starts) -> None:
        self._starts = starts
        self._is_here = False

    def __enter__(self) -> Self:
        self._starts.arrive()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_here:
            self._is_here = True
            self._starts.leave()

    async def start(self, function: Start) -> None:
        """Starts it with others that come now. Once."""
        assert not self._is_here
        self._is_here = True
        await self._starts.start(function)


Outcome = BaseException | None


def _call_all(functions: Sequence[Start]) -> list[Outcome]:
    found: list[Outcome] = []
    for function in functions:
        try:
            function()
            found.append(None)
        except BaseException as error:
            found.append(error)
    return found


def _outcomes(done: "asyncio.Future[list[Outcome]]", count: int) -> Sequence[Outcome]:
    if done.cancelled():  # the threads have ended before
        return [RuntimeError("the server is closing")] * count
    return done.result()


def _settle(futures: Sequence["asyncio.Future[None]"], outcomes: Sequence[Outcome]) -> None:
    for future, error in zip(futures, outcomes, strict=True):
        if future.done():  # its request was cancelled
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
