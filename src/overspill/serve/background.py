"""Requests of `LLM.submit`, and the thread that computes them."""

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable

from overspill.core.errors import EngineError, OrderError, OverspillError
from overspill.serve.loop import ServingLoop
from overspill.serve.params import Piece, Result, Usage
from overspill.serve.request import Request

_log = logging.getLogger("overspill")
_EXIT_WAIT = 30.0
"""Seconds that the end of the process waits for a batch: a thread that Python ends within one may
crash the process."""


class Submission:
    """Request of `LLM.submit`. Any thread may use it."""

    def __init__(
        self, request: Request, on_piece: Callable[[Piece], None] | None, owner: "Background"
    ) -> None:
        self._request = request
        self._on_piece = on_piece
        self._owner = owner
        self._cancelled = False
        self._ended = threading.Event()  # no piece follows
        request.deliver = self._deliver

    @property
    def finished(self) -> bool:
        """Whether no token follows: the request is complete, has failed, or was cancelled."""
        return self._request.finished or self._cancelled

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def error(self) -> BaseException | None:
        """The failure of the request, if it has failed."""
        return self._request.error

    @property
    def usage(self) -> Usage:
        """Numbers of tokens so far."""
        return self._request.usage

    def cancel(self) -> None:
        """End the request without more tokens; no-op if it has ended. Its memory is free before the
        next batch. A call of the callback may still run, but none begins."""
        if self.finished:
            return
        self._cancelled = True
        self._owner.cancel(self._request)
        self._end()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end of the request, at most `timeout` seconds (TimeoutError), and return its
        result. Raises the request's failure."""
        if not self._owner.is_called_back and not self._ended.wait(timeout):
            raise TimeoutError(f"no result after {timeout} seconds; the request continues")
        if self._cancelled:
            raise OrderError("this request was cancelled and has no result")
        if not self._request.finished:
            raise OrderError("this request has no result before its last piece")
        raise_error(self._request)
        return self._request.result()

    def _deliver(self, piece: Piece) -> None:
        try:
            if self._on_piece is not None and not self._cancelled:
                self._on_piece(piece)
        except BaseException as error:  # it must not end the requests of others
            _log.error("a callback of LLM.submit failed; its request is cancelled", exc_info=error)
            self.cancel()
        if piece.finish_reason is not None:
            self._end()

    def _end(self) -> None:
        self._request.deliver = _ignore  # so that they do not refer to each other any more
        self._owner.forget(self)
        self._ended.set()


class Background:
    """Thread that computes submissions. It starts with the first one. While there are none it waits
    and does not keep this object alive."""

    def __init__(self, loop: ServingLoop) -> None:
        self._loop = loop
        self._lock = threading.RLock()  # between `submit` and `close`
        self._open: set[Submission] = set()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: BaseException | None = None

    def submit(self, request: Request, on_piece: Callable[[Piece], None] | None) -> Submission:
        """Add a request whose pieces go to `on_piece`; start the thread for the first one."""
        with self._lock:
            if self._closed:
                raise OrderError("this LLM was closed; make a new one")
            if self._failure is not None:
                raise _thread_failed(self._failure)
            if self._thread is None:
                self._start()
            submission = Submission(request, on_piece, self)
            self._open.add(submission)
            self._loop.add(request)
        self._wake.put(None)
        return submission

    def cancel(self, request: Request) -> None:
        """Have the thread remove a request."""
        self._loop.cancel(request)
        self._wake.put(None)

    def forget(self, submission: Submission) -> None:
        self._open.discard(submission)

    @property
    def is_called_back(self) -> bool:
        """Whether this thread computes, and is in a callback."""
        return self._loop.computes_here

    def close(self) -> None:
        """Let the thread end after its batch. The loop ends the requests."""
        self._loop.check_may_wait("close")
        with self._lock:
            self._closed = True

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread, after `close`."""
        self._closed = True
        self._wake.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def _start(self) -> None:
        weakref.finalize(self, self._wake.put, None).atexit = False
        _STARTED.add(self)
        # a name of an engine's thread: the collector must not wait for the engine here
        self._thread = threading.Thread(
            target=_serve, args=(self._wake, weakref.ref(self)), name="overspill-serve", daemon=True
        )
        self._thread.start()

    def compute(self) -> bool:
        """Compute batches until all submissions have ended; return False if none may follow."""
        try:
            self._loop.run_until(self._is_idle)
        except BaseException as error:  # not of a model: the loop gives those to the requests
            with self._lock:
                self._failure = error
                left = list(self._open)
            _log.error("the thread that computes submissions has failed", exc_info=error)
            self._fail([each._request for each in left], _thread_failed(error))
        return not self._closed and self._failure is None

    def _fail(self, requests: list[Request], error: Exception) -> None:
        try:
            self._loop.fail(requests, error)
        finally:  # whatever the state of the loop is
            for request in requests:
                if not request.finished:
                    request.fail(error)

    def _is_idle(self) -> bool:
        return self._closed or not (self._open or self._loop.has_changes)


def _ignore(piece: Piece) -> None:
    """Ignore a piece of a request that has ended or was cancelled."""


def raise_error(request: Request) -> None:
    """Raise the failure of a request, if it has failed."""
    error = request.error
    if error is None:
        return
    if isinstance(error, OverspillError):
        raise error
    raise OverspillError(f"a batch failed: {type(error).__name__}: {error}") from error


def _thread_failed(error: BaseException) -> EngineError:
    failed = EngineError(
        f"the thread that computes submissions has failed ({type(error).__name__}: {error}); make "
        "a new LLM"
    )
    failed.__cause__ = error
    return failed


_STARTED: "weakref.WeakSet[Background]" = weakref.WeakSet()


def _serve(wake: "queue.SimpleQueue[None]", owner: "weakref.ref[Background]") -> None:
    while True:
        wake.get()
        background = owner()
        if background is None or not background.compute():
            return
        del background  # it may be collected while this thread waits


@atexit.register
def _join_all() -> None:
    for background in list(_STARTED):
        background.join(_EXIT_WAIT)
