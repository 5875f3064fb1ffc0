"""`pytest --workers`: what forked workers report, and what happens when one ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_OUTCOMES = """
import subprocess, warnings
import pytest

@pytest.fixture(scope="module")
def module():
    yield
    raise ValueError("the end of a module")

def test_passes(module):
    pass

def test_fails(capfd):
    subprocess.run(["echo", "printed by a process"])
    assert False

@pytest.mark.skip
def test_is_skipped():
    pass

def test_warns():
    warnings.warn("take care", FutureWarning)

@pytest.fixture
def broken():
    raise ValueError("a fixture")

def test_has_a_broken_fixture(broken):
    pass
"""

_DEATHS = """
import os, pathlib, time

def test_leaves_a_process():
    if pid := os.fork():
        pathlib.Path("left").write_text(str(pid))
        os._exit(3)
    time.sleep(60)
    os._exit(0)

def test_is_killed():
    os.kill(os.getpid(), 9)

def test_comes_after():
    pass
"""

_WAITS = """
import pathlib, time
import pytest

@pytest.fixture(scope="session")
def started():
    pathlib.Path("started").touch()
    yield
    pathlib.Path("ended").touch()

def test_waits(started):
    time.sleep(60)
"""

_FAILS = """
import pathlib, time

def test_fails():
    while not pathlib.Path("started").exists():
        time.sleep(0.01)
    assert False

def test_comes_after():
    pass
"""

_FOLDERS = """
def test_has_a_folder_of_this_name(tmp_path):
    (tmp_path / "file").touch(exist_ok=False)
"""


def _run(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    """The exit code and the output. Not through a pipe: a process that is left behind holds it."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["PYTEST_DEBUG_TEMPROOT"] = str(folder)
    command = [sys.executable, "-m", "pytest", "-p", "tests.workers", "--workers", "2", *options]
    with (folder / "output").open("w+") as output:
        run = subprocess.run(
            [*command, "--rootdir", folder, folder],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            timeout=60,
        )
        output.seek(0)
        return run.returncode, output.read()


@pytest.fixture(scope="module")
def failing_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    folder = tmp_path_factory.mktemp("failing")
    code, output = _run(folder, {"outcomes": _OUTCOMES, "deaths": _DEATHS})
    return folder, code, output


def test_outcomes_are_counted_and_shown(failing_run: tuple[Path, int, str]) -> None:
    _, code, output = failing_run
    assert code == 1
    counts = "3 failed, 3 passed, 1 skipped, 1 warning, 2 errors"
    assert counts in output.splitlines()[-1]
    assert "ERROR at teardown of test_has_a_broken_fixture" in output
    assert re.search(r"Captured stdout call -+\nprinted by a process", output)
    assert "FutureWarning: take care" in output


def test_a_test_that_ends_its_process_fails_by_name(failing_run: tuple[Path, int, str]) -> None:
    folder, _, output = failing_run
    os.kill(int((folder / "left").read_text()), signal.SIGKILL)  # no test has waited for it
    assert re.search("_ test_leaves_a_process _+\n.*ended with exit code 3", output)
    assert re.search("_ test_is_killed _+\n.*ended with signal 9", output)


def test_the_first_failure_ends_other_workers_and_their_fixtures(tmp_path: Path) -> None:
    code, output = _run(tmp_path, {"waits": _WAITS, "fails": _FAILS}, "-x")
    assert code == 1
    assert "stopping after 1 failures" in output
    assert output.splitlines()[-1].strip("= ").startswith("1 failed in ")
    assert (tmp_path / "ended").exists()


def test_workers_have_folders_of_their_own_that_the_session_removes(tmp_path: Path) -> None:
    policy = "tmp_path_retention_policy=failed"
    code, output = _run(tmp_path, {"one": _FOLDERS, "two": _FOLDERS}, "-o", policy)
    assert code == 0
    assert "2 passed" in output
    assert not [path for path in tmp_path.glob("pytest-of-*/*") if path.exists()]
