"""`pytest --workers 3` runs tests in processes that are forked when all tests are collected.

Workers that are started anew, as those of pytest-xdist, import torch and collect all tests again,
each for as long as hundreds of tests take. Forked ones cost so little that there can be more of
them than cores: others compute while a test waits. A process that has asked for GPUs cannot use
them after a fork: GPU tests run without this option.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import pytest

from tests.worker_process import Ended, work


class Hooks:
    def pytest_worker_start(self) -> None:
        """Called in each worker before its first test."""

    def pytest_worker_end(self) -> None:
        """Called in each worker after its last test."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers",
        metavar="N",
        type=_number,
        default=0,
        help='run tests in N forked processes; "auto": one more than there are cores',
    )


def _number(text: str) -> int:
    if text == "auto":
        return len(os.sched_getaffinity(0)) + 1
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'{text!r} is neither a number nor "auto"')
    return int(text)


def number_of_workers(config: pytest.Config) -> int:
    """0 if the tests run in this process. A debugger needs its terminal."""
    return 0 if config.option.usepdb else int(config.getoption("--workers"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    workers = number_of_workers(session.config)
    if workers and session.config.getoption("numprocesses", None):
        raise pytest.UsageError("--workers and -n exclude each other: give one of them")
    failed = session.testsfailed and not session.config.option.continue_on_collection_errors
    if not workers or failed or session.config.option.collectonly:
        return None  # pytest's own loop
    _Distribution(session).run(workers)
    return True


class _Worker(NamedTuple):
    process: Any
    todo: deque[int]
    """Positions of the tests that it was given and that have not ended; it runs the first one."""


class _Distribution:
    """Gives the tests of one file after the other to the next worker that asks for more.

    Only the worker has its end of a connection: if that is closed, the worker has ended."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._hook = session, session.config.hook
        self._todo = deque(_files(session.items))
        self._workers: dict[Connection, _Worker] = {}
        self._numbers = itertools.count()

    def run(self, workers: int) -> None:
        config = self._session.config
        # workers make their folders in this one, which the session removes
        config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        reporter = config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # several files at a time
        try:
            for _ in range(min(workers, len(self._todo))):
                self._start()
            while self._workers:
                for connection in wait([*self._workers]):
                    assert isinstance(connection, Connection)
                    self._listen(connection)
        finally:
            self._stop()
        if self._todo:
            raise RuntimeError("all workers have ended before their first test")

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        connection, other = context.Pipe()
        arguments = self._session, next(self._numbers), other, [connection, *self._workers]
        process = context.Process(target=work, args=arguments)
        process.start()
        other.close()
        self._workers[connection] = _Worker(process, deque())

    def _listen(self, connection: Connection) -> None:
        worker = self._workers[connection]
        try:
            message = connection.recv()
        except (EOFError, OSError):
            self._replace(connection)
            return
        if isinstance(message, BaseException):
            raise message
        if message is None:
            found = self._todo.popleft() if self._todo else []
            worker.todo.extend(found)
            with contextlib.suppress(OSError):  # it has ended, which the next `recv` finds
                connection.send(found)
        else:
            worker.todo.remove(message.position)
            self._report(message)

    def _replace(self, connection: Connection) -> None:
        """A worker that has ended, if it has not run all of its tests."""
        process, todo = self._workers.pop(connection)
        connection.close()
        _end(process, time.monotonic() + 10)
        if not todo:
            return
        position = todo.popleft()
        if todo:
            self._todo.appendleft([*todo])
        if self._todo:
            self._start()
        report = _death(self._session.items[position], process.exitcode)
        data = self._hook.pytest_report_to_serializable(config=self._session.config, report=report)
        self._report(Ended(position, [data], [], False, False))

    def _report(self, ended: Ended) -> None:
        """What pytest does in its own loop."""
        session, hook = self._session, self._hook
        for found in ended.warnings:
            category = type(found.category, (Warning,), {})
            place = found.file, found.line
            message = warnings.WarningMessage(category(found.text), category, *place)
            arguments = {"warning_message": message, **found.context}
            hook.pytest_warning_recorded.call_historic(kwargs=arguments)
        for data in ended.reports:
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        item = session.items[ended.position]
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        session.shouldfail = session.shouldfail or ended.shouldfail
        session.shouldstop = session.shouldstop or ended.shouldstop
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _stop(self) -> None:
        """Interrupts the workers that have not ended: fixtures end what they have started."""
        for connection, worker in self._workers.items():
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGINT)
        end = time.monotonic() + 10
        for worker in self._workers.values():
            _end(worker.process, end)


def _end(process: Any, end: float) -> None:
    """Waits, then kills. `join` with a timeout would wait for what a test has left behind too."""
    while process.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()  # no-op if it has ended
    process.join()


def _files(items: Sequence[pytest.Item]) -> Iterator[list[int]]:
    for _, group in itertools.groupby(enumerate(items), key=lambda pair: pair[1].path):
        yield [position for position, _ in group]


def _death(item: pytest.Item, code: int) -> pytest.TestReport:
    by = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=f"the process that ran this test ended with {by}",
        when="call",
    )
