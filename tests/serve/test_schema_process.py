"""Schemas are compiled in another process, which bounds their time and memory."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill.core.errors import ConfigError, OrderError, OverspillError
from overspill.serve.schema_process import Attempt, SchemaProcess
from tests.waiting import wait_until

HOURS = '{"type": "integer", "multipleOf": 99999989}'
"""It takes gigabytes, too."""
QUICK = '{"type": "integer"}'


@pytest.fixture
def unlimited() -> Iterator[SchemaProcess]:
    """Schemas are compiled until they are cancelled."""
    process = SchemaProcess(600, 2 << 30)
    yield process
    process.close()


def children(process: SchemaProcess) -> list[int]:
    """Its processes that compile."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if int(parent) == process.pid:
            found.append(int(stat.parent.name))
    return found


def compile_in_thread(process: SchemaProcess, attempt: Attempt) -> tuple[threading.Thread, list]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            process.compile(HOURS, attempt)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: bool(children(process)))
    return thread, errors


@pytest.mark.parametrize(
    ("seconds", "memory", "limit"), [(1, 1 << 30, "1 seconds"), (60, 16 << 20, "16 MiB")]
)
def test_a_schema_that_reaches_a_limit_is_refused(seconds: int, memory: int, limit: str) -> None:
    process = SchemaProcess(seconds, memory)
    with pytest.raises(ConfigError, match=f"json_schema is too complex: .*{limit}"):
        process.compile(HOURS, Attempt())
    assert '"grammars"' in process.compile(QUICK, Attempt()), "the limits are for each schema"
    process.close()


def test_schemas_do_not_wait_for_each_other_and_end_when_they_are_cancelled(
    unlimited: SchemaProcess,
) -> None:
    attempts = [Attempt() for _ in range(3)]
    running = [compile_in_thread(unlimited, attempt) for attempt in attempts]
    wait_until(lambda: len(children(unlimited)) == 3)
    unlimited.compile(QUICK, Attempt())
    for count, (attempt, (thread, errors)) in enumerate(zip(attempts, running, strict=True)):
        attempt.cancel()
        thread.join(10)
        assert not thread.is_alive()
        assert isinstance(errors[0], OrderError)
        wait_until(lambda left=2 - count: len(children(unlimited)) == left)


def test_a_cancelled_attempt_compiles_nothing(unlimited: SchemaProcess) -> None:
    attempt = Attempt()
    attempt.cancel()
    with pytest.raises(OrderError, match="cancelled"):
        unlimited.compile(QUICK, attempt)


def test_a_process_that_was_killed_starts_again(unlimited: SchemaProcess) -> None:
    expected = unlimited.compile(QUICK, Attempt())
    first = unlimited.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert unlimited.compile(QUICK, Attempt()) == expected
    assert unlimited.pid != first


def test_a_schema_that_compiles_when_the_process_is_killed_is_compiled_again(
    unlimited: SchemaProcess,
) -> None:
    attempt = Attempt()
    thread, errors = compile_in_thread(unlimited, attempt)
    (orphan,) = children(unlimited)
    assert unlimited.pid is not None
    os.kill(unlimited.pid, signal.SIGKILL)
    try:
        unlimited.compile(QUICK, Attempt())
        assert not errors
    finally:
        os.kill(orphan, signal.SIGKILL)
    wait_until(lambda: bool(children(unlimited)))
    attempt.cancel()
    thread.join(10)
    assert isinstance(errors[0], OrderError)


def test_close_ends_what_is_compiled(unlimited: SchemaProcess) -> None:
    thread, errors = compile_in_thread(unlimited, Attempt())
    began = time.monotonic()
    unlimited.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert time.monotonic() - began < 10
    wait_until(lambda: not children(unlimited))
    with pytest.raises(OrderError, match="closed"):
        unlimited.compile(QUICK, Attempt())


def test_the_process_ends_with_its_owner() -> None:
    process = SchemaProcess()
    process.compile(QUICK, Attempt())
    pid = process.pid
    assert pid is not None
    del process
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_ctrl_c_does_not_end_the_process(unlimited: SchemaProcess) -> None:
    unlimited.compile(QUICK, Attempt())
    pid = unlimited.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    unlimited.compile(QUICK, Attempt())
    assert unlimited.pid == pid


def test_an_answer_of_a_child_whose_parent_was_killed_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing tells how such a child has ended."""
    process = SchemaProcess()
    answers = iter([b'{"grammar": "a"}', b'{"grammar": "b"}\n0'])
    monkeypatch.setattr(process, "_ask", lambda schema, attempt: next(answers))
    assert process.compile(QUICK, Attempt()) == "b"


def test_close_does_not_wait_for_forked_children(unlimited: SchemaProcess) -> None:
    """They have copies of its sockets."""
    unlimited.compile(QUICK, Attempt())
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        began = time.monotonic()
        unlimited.close()
        assert time.monotonic() - began < 3
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_python_without_a_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is embedded."""
    monkeypatch.setattr("sys.executable", None)
    with pytest.raises(OverspillError, match="cannot be started"):
        SchemaProcess().compile(QUICK, Attempt())
