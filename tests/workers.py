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
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import pytest
from _pytest.config import create_terminal_writer


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


class _Warning(NamedTuple):
    """As text: a warning may hold what cannot be pickled."""

    category: str
    text: str
    file: str
    line: int
    context: dict[str, Any]
    """The other arguments of the hook."""


class _Ended(NamedTuple):
    """A test that has ended in a worker."""

    position: int
    reports: list[dict[str, Any]]
    warnings: list[_Warning]
    shouldfail: bool | str
    shouldstop: bool | str


class _Worker(NamedTuple):
    process: Any
    todo: deque[int]
    """Positions of the tests that it was given and that have not ended; it runs the first one."""


class _Distribution:
    """Gives the tests of one file after the other to the next worker that asks for more.

    A worker sends None for that, an `_Ended` after each test, and an exception if it must stop. No
    other process has its end of the connection: if that is closed, the worker has ended."""

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
        process = context.Process(target=_work, args=arguments)
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
        self._report(_Ended(position, [data], [], False, False))

    def _report(self, ended: _Ended) -> None:
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


def _work(
    session: pytest.Session, number: int, connection: Connection, unused: Sequence[Connection]
) -> None:
    """In a forked process."""
    for each in unused:
        each.close()
    # a process that a test leaves behind must not hold the connection
    os.register_at_fork(after_in_child=connection.close)
    _separate(session.config, number)
    hook = session.config.hook
    try:
        hook.pytest_worker_start()
        _run_tests(session, connection)
        hook.pytest_worker_end()
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _give_up(session, connection, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _separate(config: pytest.Config, number: int) -> None:
    """Processes would share the files that capture output, and names of folders."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"worker-{number}"
    folders._basetemp.mkdir(mode=0o700)


def _give_up(session: pytest.Session, connection: Connection, error: BaseException) -> None:
    """Ends fixtures and passes on why. The connection is closed if the session has ended."""
    with contextlib.suppress(BaseException):
        session._setupstate.teardown_exact(None)
    with contextlib.suppress(BaseException):
        session.config.hook.pytest_worker_end()
    if not isinstance(error, KeyboardInterrupt | pytest.exit.Exception):
        error = RuntimeError("".join(traceback.format_exception(error)))
    with contextlib.suppress(OSError):
        connection.send(error)


def _run_tests(session: pytest.Session, connection: Connection) -> None:
    recorder = _Recorder(session.config)
    manager = session.config.pluginmanager
    manager.unregister(name="terminalreporter")
    manager.register(recorder, "terminalreporter")
    tests = _tests(connection)
    current = next(tests, None)
    while current is not None:
        following = next(tests, None)
        item = session.items[current]
        after = None if following is None else session.items[following]
        recorder.reports, recorder.warnings = [], []
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        stop = session.shouldfail, session.shouldstop
        connection.send(_Ended(current, recorder.reports, recorder.warnings, *stop))
        current = following


def _tests(connection: Connection) -> Iterator[int]:
    """Positions of tests, until there are no more."""
    found = [0]
    while found:
        connection.send(None)
        found = connection.recv()
        yield from found


class _Recorder:
    """What a test reports. Takes the place of pytest's reporter, whose writer plugins ask for:
    what they write is captured as output of the test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.reports: list[dict[str, Any]] = []
        self.warnings: list[_Warning] = []

    @property
    def _tw(self) -> Any:
        return create_terminal_writer(self._config, sys.stderr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self.reports.append(hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        name, text = warning_message.category.__name__, str(warning_message.message)
        place = warning_message.filename, warning_message.lineno
        context = {"when": when, "nodeid": nodeid, "location": location}
        self.warnings.append(_Warning(name, text, *place, context))
