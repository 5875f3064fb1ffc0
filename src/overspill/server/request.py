"""One HTTP request for answers, from its admission to the end of its response."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from overspill.core.errors import EngineError, OrderError
from overspill.server.answers import Answers
from overspill.server.errors import draining, engine_gone
from overspill.server.events import COMMENT, DONE, EventStream, watch_disconnect
from overspill.server.failures import explain
from overspill.server.forms import usage_of
from overspill.server.limits import Disconnected
from overspill.server.plan import Plan
from overspill.server.service import Service
from overspill.server.start_batcher import Start

if TYPE_CHECKING:
    from overspill.serve.grammar import Compilation

KEEP_ALIVE = 15.0
"""Seconds after which a stream sends something in any case: proxies close connections that are
silent, and a first token may take longer."""
_CLIENT_GONE = 499  # no client reads it; nginx counts such requests with this number


@contextmanager
def _every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Call a function repeatedly. One timer costs less than one for each wait."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal timer
        call()
        timer = loop.call_later(seconds, tick)

    timer = loop.call_later(seconds, tick)
    try:
        yield
    finally:
        timer.cancel()


class ApiRequest:
    """HTTP request for one answer or several. Its answers count as in progress until `end`."""

    def __init__(self, service: Service, samples: int) -> None:
        """`samples` is the number of answers. Raises an `ApiError` if the server is full."""
        service.admit(samples)
        self._service = service
        self._samples = samples
        self._answers: Answers | None = None
        self._ended = False
        self._schema_field = "response_format"
        limit = service.config.limits.request_timeout
        self._deadline = asyncio.get_running_loop().time() + limit

    async def run(self, request: Request, plan: Callable[[], Plan], stream: bool) -> Response:
        """Return the complete response, or with `stream` the beginning of it. `plan` tokenizes the
        prompts, in another thread."""
        try:
            async with asyncio.timeout_at(self._deadline):
                planned, answers = await self._begin(request, plan, stream)
                if not stream:
                    return await self._whole(request, planned, answers)
        except Disconnected:
            self.end()
            return Response(status_code=_CLIENT_GONE)
        except BaseException as error:
            self.end()
            if isinstance(error, Exception):
                raise explain(error, self._service.config, self._schema_field) from error
            raise
        return EventStream(
            self._events(planned, answers),
            self._deadline,
            answers.disconnect,
            lambda error: explain(error, self._service.config, planned.schema_field),
            self.end,
        )

    async def _begin(
        self, request: Request, plan: Callable[[], Plan], stream: bool
    ) -> tuple[Plan, Answers]:
        """Tokenize the prompts, compile their schema, and give the answers to the engine."""
        service = self._service
        with service.start_batcher.arrival() as start:
            planned = await service.in_thread(plan)
            self._schema_field = planned.schema_field
            compilation = service.llm.compile_schema(planned.jobs[0].params)
            if compilation is None:
                return planned, await self._start(planned, stream, start)
        with compilation:  # other requests do not wait for it
            await self._compiled(request, compilation)
            with service.start_batcher.arrival() as start:
                return planned, await self._start(planned, stream, start)

    async def _compiled(self, request: Request, compilation: "Compilation") -> None:
        """Wait for a compilation. Raises if there is no grammar, if the client disconnects, and if
        the server shuts down."""
        wake, gone, queue = asyncio.Event(), asyncio.Event(), self._service.loop_queue

        def leave() -> None:
            gone.set()
            wake.set()

        watcher = asyncio.create_task(watch_disconnect(request.receive, leave))
        compilation.when_done(lambda: queue.put(wake.set))
        try:
            with self._service.compiling(wake):
                await wake.wait()
        finally:
            watcher.cancel()
        if gone.is_set():
            raise Disconnected
        if not compilation.done:
            raise draining()
        compilation.check()

    async def _start(self, planned: Plan, stream: bool, start: Start) -> Answers:
        service = self._service
        queue, count = service.loop_queue, service.rate.add
        self._answers = answers = Answers(queue, planned.jobs, stream, count)
        service.answers.add(answers)
        try:
            await start(partial(answers.start, service.llm))
        except (EngineError, OrderError) as error:  # the thread that computes has ended
            service.failed = True
            raise engine_gone() from error
        return answers

    async def _whole(self, request: Request, planned: Plan, answers: Answers) -> Response:
        watcher = asyncio.create_task(watch_disconnect(request.receive, answers.disconnect))
        try:
            async for _ in answers.pieces():
                pass
        finally:
            watcher.cancel()
        self.end()
        if answers.disconnected:
            return Response(status_code=_CLIENT_GONE)
        results = answers.results()
        body = planned.form.body(results, usage_of(results, planned.samples))
        return Response(json.dumps(body), media_type="application/json")

    async def _events(self, planned: Plan, answers: Answers) -> AsyncIterator[bytes]:
        form = planned.form
        if opening := form.opening():
            yield opening
        with _every(KEEP_ALIVE, answers.nudge):
            async for pieces in answers.pieces():
                events = b"".join(form.events(index, piece) for index, piece in pieces)
                if events or not pieces:
                    yield events or COMMENT
        if not answers.disconnected:
            yield form.closing(usage_of(answers.results(), planned.samples)) + DONE

    def end(self) -> None:
        """Free all that the request holds; no-op if it has ended."""
        if self._ended:
            return
        self._ended = True
        self._service.release(self._samples)
        if self._answers is not None:
            self._answers.cancel()
            self._service.answers.discard(self._answers)
            self._service.metrics.count_answers(self._answers)
