"""A worker of `pytest --workers`: a forked process that runs the tests that it gets.

It sends None if it wants tests, which come as a list of positions that is empty if there are no
more, an `Ended` after each test, and an exception if the session must stop.
"""

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
from _pytest.config import create_terminal_writer


class RecordedWarning(NamedTuple):
    """As text: a warning may hold what cannot be pickled."""

    category: str
    text: str
    file: str
    line: int
    context: dict[str, Any]
    """The other arguments of the hook."""


class Ended(NamedTuple):
    """A test that has ended in a worker."""

    position: int
    reports: list[dict[str, Any]]
    warnings: list[RecordedWarning]
    shouldfail: bool | str
    shouldstop: bool | str


def work(
    session: pytest.Session, number: int, connection: Connection, unused: Sequence[Connection]
) -> None:
    """Never returns."""
    for each in unused:
        each.close()
    # a process that a test leaves behind must not hold the connection
    os.register_at_fork(after_in_child=connection.close)
    # ignored in background jobs of a shell, but the session stops workers with it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hook = session.config.hook
    try:
        _separate(session.config, number)
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
    """Ends fixtures and passes on why."""
    try:
        session._setupstate.teardown_exact(None)
        session.config.hook.pytest_worker_end()
    except BaseException:
        traceback.print_exc()
    if not isinstance(error, KeyboardInterrupt | pytest.exit.Exception):
        error = RuntimeError("".join(traceback.format_exception(error)))
    with contextlib.suppress(OSError):  # the session has ended before
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
        connection.send(Ended(current, recorder.reports, recorder.warnings, *stop))
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
        self.warnings: list[RecordedWarning] = []

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
        self.warnings.append(RecordedWarning(name, text, *place, context))
