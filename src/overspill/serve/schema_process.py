"""Compilation of JSON schemas in another process, within limits of time and memory."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

from overspill.core.errors import ConfigError, OrderError, OverspillError
from overspill.serve import schema_worker

_CPU_SECONDS = 2
"""CPU time for one schema. A few hundred properties take a tenth of a second."""
_MEMORY = 128 << 20
_WAIT_SECONDS = 30.0
"""Time for one schema on a busy machine."""
_END_SECONDS = 5.0


class PassingError(ConfigError):
    """A schema was not compiled, for a reason that may pass."""


class BusyError(PassingError):
    """A schema was not compiled in time, though it has reached no limit: the machine is busy."""


class Attempt:
    """Compilation of one schema. Any thread may cancel it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the connection: `cancel` must not find a closed one
        self._connection: socket.socket | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """End the compilation at once; no-op if it has ended."""
        with self._lock:
            self.cancelled = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # the other end has closed it
                    self._connection.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        if self.cancelled:
            raise OrderError("the json_schema is not compiled any further: it was cancelled")

    @contextlib.contextmanager
    def over(self, connection: socket.socket) -> Iterator[None]:
        """Context in which the compilation uses a connection. Raises if it was cancelled."""
        with self._lock:
            self.check()
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None


class SchemaProcess:
    """Process that compiles schemas; it starts with the first one. llguidance has limits of its
    own, but some schemas of 50 characters take hours and gigabytes before they reach a limit."""

    def __init__(self, seconds: int = _CPU_SECONDS, memory: int = _MEMORY) -> None:
        """Each schema may take `seconds` of the CPU and `memory` bytes."""
        self._limits = seconds, memory
        self.pid: int | None = None
        self._lock = threading.Lock()  # guards the rest
        self._control: socket.socket | None = None
        self._end: weakref.finalize[..., SchemaProcess] | None = None
        self._closed = False

    def compile(self, schema: str, attempt: Attempt) -> str:
        """Return the grammar of a schema, as text for llguidance."""
        for _ in range(2):  # the process may have been killed since the last schema, or just now
            answer = self._ask(schema, attempt)
            attempt.check()
            content, ended, code = answer.rpartition(schema_worker.ENDED)
            if ended and code:
                return self._read(content, code)
        raise OverspillError(
            "the process that compiles JSON schemas has ended twice; is the machine out of memory?"
        )

    def _read(self, content: bytes, code: bytes) -> str:
        if code != b"0":
            seconds, memory = self._limits
            # 1 is an error of Python: the process may lack something else, too
            kind = PassingError if code == b"1" else ConfigError
            raise kind(
                f"json_schema is too complex: compiling it takes more than {seconds} seconds or "
                f"{memory >> 20} MiB; give a simpler one"
            )
        result = json.loads(content)
        if "problem" in result:
            raise ConfigError(f"json_schema cannot be used: {first_line(result['problem'])}")
        return str(result["grammar"])

    def _ask(self, schema: str, attempt: Attempt) -> bytes:
        """Return the answer of the process, without a code at the end if the process has ended."""
        answer, end = b"", time.monotonic() + _WAIT_SECONDS
        with self._connect() as connection, attempt.over(connection):
            try:
                connection.settimeout(_WAIT_SECONDS)
                schema_worker.send(connection, schema)
                while part := connection.recv(1 << 16):
                    answer += part
                    connection.settimeout(max(end - time.monotonic(), 0.001))
            except TimeoutError as error:
                raise BusyError(
                    f"json_schema was not compiled within {_WAIT_SECONDS:g} seconds, since this "
                    "machine is busy; try again later"
                ) from error
            except OSError:
                pass  # cancelled, or the process has ended
        return answer

    def _connect(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise OrderError("this LLM was closed; make a new one")
            ours, theirs = socket.socketpair()
            with theirs:
                for control in (self._control, None):
                    try:
                        socket.send_fds(control or self._start(), [b"\0"], [theirs.fileno()])
                        return ours
                    except OSError:  # it has ended
                        self._stop()
            ours.close()
            raise OverspillError("the process that compiles JSON schemas ends when it starts")

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = map(str, (theirs.fileno(), *self._limits))
            command = [sys.executable, "-P", schema_worker.__file__, *numbers]
            path = os.pathsep.join(folder for folder in sys.path if folder)
            # an arena of malloc for another thread would count as memory
            environment = {**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"}
            try:
                process = subprocess.Popen(
                    command, env=environment, pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                )  # fmt: skip
            except (OSError, TypeError) as error:  # an embedded Python has no sys.executable
                ours.close()
                raise OverspillError(
                    f"the process that compiles JSON schemas cannot be started: {error}"
                ) from error
        self._control, self.pid = ours, process.pid
        self._end = weakref.finalize(self, _end_process, ours, process, os.getpid())
        return ours

    def _stop(self) -> None:
        self._control = None
        if self._end is not None:
            self._end()

    def close(self) -> None:
        """End the process and all compilations."""
        with self._lock:
            self._closed = True
            self._stop()


def first_line(text: str) -> str:
    """Return the first line of an error of llguidance: later lines have the whole grammar."""
    line = (text.strip().splitlines() or ["unknown reason"])[0]
    return line if len(line) <= 300 else f"{line[:300]}..."


def _end_process(control: socket.socket, process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() != owner:  # a forked child has a copy only
        control.close()
        return
    with contextlib.suppress(OSError):  # it has ended already
        control.shutdown(socket.SHUT_RDWR)  # which ends it, also if forked children have copies
    control.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
