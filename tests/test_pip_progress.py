"""The progress of an installation: short, alive, and complete if it fails."""

import io
import re
import sys

from tests.pip_progress import run

PIP = """
import sys, time
print("Collecting torch==2.13.0")
print("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (104.9 MB)", flush=True)
print("Progress 52428800 of 104857600", flush=True)
time.sleep(1.3)
print("  Downloading typing_extensions-4.12-py3-none-any.whl (44 kB)")
print("Installing collected packages: typing_extensions, torch")
sys.exit(int(sys.argv[1]))
"""


def _run(code: int, live: bool) -> tuple[int, list[str]]:
    out = io.StringIO()
    ended = run("PyTorch", [sys.executable, "-c", PIP, str(code)], out, live)
    return ended, re.sub(r"\d+ s\b", "N s", out.getvalue()).split("\n")


def test_a_log_gets_a_line_for_each_large_download() -> None:
    ended, lines = _run(0, live=False)
    assert ended == 0
    assert lines == [
        "PyTorch: installing",
        "PyTorch: downloading torch-2.13.0 (104.9 MB)",
        "PyTorch: done after N s",
        "",
    ]


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    ended, lines = _run(0, live=True)
    assert ended == 0
    assert len(lines) == 2  # the last one is empty
    shown = lines[0].split("\r\x1b[K")
    assert "PyTorch: downloading torch-2.13.0 (104.9 MB), 50% (N s)" in shown
    assert shown[-1] == "PyTorch: done after N s"


def test_a_failure_shows_everything_that_pip_said() -> None:
    ended, lines = _run(3, live=False)
    assert ended == 3
    assert "PyTorch: failed after N s" in lines
    assert "Collecting torch==2.13.0" in lines
    assert not any(line.startswith("Progress") for line in lines)
