"""Requests that arrive at the same time are given to the engine together."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

Function = Callable[[], None]
Start = Callable[[Function], Coroutine[Any, Any, None]]
Outcome = BaseException | None


class StartBatcher:
    """Gives requests to the engine. A prompt that comes a millisecond after others would wait until
    their batch has ended. So a request waits for those that are being tokenized, for a short time,
    and all are given to the engine one right after the other."""

    def __init__(self, threads: Executor, max_wait: float = 0.01) -> None:
        """A request waits at most `max_wait` seconds for others."""
        self._threads = threads
        self._max_wait = max_wait
        self._arriving = 0
        self._waiting: list[tuple[Function, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def arrival(self) -> Iterator[Start]:
        """Context of one request from its arrival to its start, or to its failure before that.

        Yields an asynchronous function for the start: it calls a function in another thread, one
        right after those of other requests, and raises what the function raises. Called once.
        """
        self._arriving += 1
        started = False

        async def start(function: Function) -> None:
            nonlocal started
            assert not started
            started = True
            await self._start(function)

        try:
            yield start
        finally:
            if not started:
                self._leave()

    def _leave(self) -> None:
        """Count one arriving request less; start the waiting ones if it was the last."""
        self._arriving -= 1
        if self._arriving == 0:
            self._start_all()

    async def _start(self, function: Function) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append((function, future))
        if self._timer is None:
            self._timer = loop.call_later(self._max_wait, self._start_all)
        self._leave()
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


def _call_all(functions: Sequence[Function]) -> list[Outcome]:
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
