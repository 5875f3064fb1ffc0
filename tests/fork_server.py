"""Processes that have torch and the tests imported already.

A `ForkServer` forks a child for every function that it is given. Its own process is forked before
a test has computed, so that no thread of torch's is lost by it: conftest.py calls `fork_server()`
after collection.
"""

import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@functools.cache
def fork_server() -> "ForkServer":
    """The one of this process."""
    return ForkServer()


class ForkServer:
    """Starts functions; each is a process of its own. A function and its arguments are pickled."""

    def __init__(self) -> None:
        import torch

        # a process that has asked for GPUs cannot use them after a fork
        forked = not torch.cuda.is_available()
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        self._connection, other = context.Pipe()
        # the server ends when the last end of the tests' side is closed: it must not hold one
        unused = self._connection if forked else None
        self._server = context.Process(target=_serve, args=(other, unused))
        self._server.start()
        other.close()
        self._requests = 0

    def preload(self, names: Sequence[str]) -> None:
        """Imports modules, once for all functions that start later."""
        self._ask("import", names)

    def start(self, function: Callable[..., int | None], *args: Any, log: Path) -> int:
        """Calls a function, whose result is the exit code; returns the id of its process, which is
        also that of a new process group. `log` gets what it prints."""
        return int(self._ask("start", pickle.dumps((function, args)), log))

    def wait(self, pid: int) -> int:
        """The exit code, negative for the signal that ended the process."""
        pause = 1e-3
        while (code := self._ask("poll", pid)) is None:
            time.sleep(pause)
            pause = min(0.02, 1.5 * pause)
        return int(code)

    def run(self, function: Callable[..., int | None], *args: Any, log: Path) -> int:
        """Starts a function and waits for it. What it has started ends too if that fails."""
        pid = self.start(function, *args, log=log)
        try:
            return self.wait(pid)
        except BaseException:
            os.killpg(pid, signal.SIGKILL)
            self.wait(pid)
            raise

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a function."""
        with tempfile.TemporaryDirectory() as folder:
            result, log = Path(folder) / "result", Path(folder) / "log"
            code = self.run(_call, result, function, args, log=log)
            print(log.read_text(), end="")
            assert code == 0, f"the process ended with {code}"
            return pickle.loads(result.read_bytes())

    def close(self) -> None:
        self._connection.close()
        self._server.join(60)

    def _ask(self, *request: object) -> Any:
        self._requests += 1
        self._connection.send((self._requests, *request))
        number = 0
        while number != self._requests:  # a timeout may have interrupted the request before
            number, answer = self._connection.recv()
        return answer


def _call(result: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    result.write_bytes(pickle.dumps(function(*args)))


def _serve(connection: Connection, unused: Connection | None) -> None:
    if unused is not None:
        unused.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which end the server
    codes: dict[int, int | None] = {}  # None for children that have not ended
    while True:
        try:
            number, what, *rest = connection.recv()
        except EOFError:
            break
        if what == "start":
            request, log = rest
            pid = os.fork()
            if pid == 0:
                connection.close()
                os._exit(_run(request, log))
            os.setpgid(pid, pid)  # it can be killed with what it has started
            codes[pid] = None
            connection.send((number, pid))
        elif what == "import":
            _import(rest[0])
            connection.send((number, None))
        else:
            (pid,) = rest
            if codes[pid] is None and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(status[1])
            connection.send((number, codes[pid]))
    for pid, code in codes.items():
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _import(names: Sequence[str]) -> None:
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        importlib.import_module(name)
    if missing:
        gc.collect()
        gc.freeze()  # else each child would count the objects of all modules


def _run(request: bytes, log: Path) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    try:
        function, args = pickle.loads(request)
        return function(*args) or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
