import contextlib
import io
import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from overspill.parallel.rank_logs import RankLogs


@pytest.fixture
def logs(tmp_path: Path) -> RankLogs:
    return RankLogs(tmp_path / "logs", after=tmp_path / "config.json")


def test_output_is_copied_to_its_stream_and_to_a_file_of_the_rank(
    logs: RankLogs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        with logs.streams(rank) as (output, errors):
            os.write(output, b"early %d\n" % rank)
            os.write(errors, b"wrong\n")
    assert logs.copy()
    assert capfd.readouterr() == ("early 0\nearly 1\n", "wrong\n" * 2)
    assert not logs.folder.exists()  # a run that could not begin leaves no files
    assert logs.mention(1) == ""
    (tmp_path / "config.json").touch()
    logs.close()
    assert [logs.path(rank).read_text() for rank in range(2)] == [
        "early 0\nwrong\n",
        "early 1\nwrong\n",
    ]
    assert logs.mention(1) == f"; its output is in {tmp_path}/logs/rank-1.log"


def test_later_runs_append_and_a_full_disk_does_not_stop_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("first\n")
    (tmp_path / "logs" / "rank-1.log").symlink_to("/dev/full")
    logs = RankLogs(tmp_path / "logs", after=tmp_path)
    for rank in range(2):
        with logs.streams(rank) as (output, _):
            os.write(output, b"second\n")
    logs.close()
    assert logs.path(0).read_text() == "first\nsecond\n"
    output, errors = capfd.readouterr()
    assert output == "second\n" * 2
    assert errors == (
        f"warning: {logs.path(1)} cannot be written (No space left on device) and is not complete\n"
    )


@contextlib.contextmanager
def terminal() -> Iterator[int]:
    """Standard output is a terminal; its other end."""
    main, end = pty.openpty()
    kept = os.dup(1)
    os.dup2(end, 1)
    try:
        yield main
    finally:
        os.dup2(kept, 1)
        for each in (main, end, kept):
            os.close(each)


def test_a_terminal_shows_a_progress_bar_and_the_file_how_it_ended(
    logs: RankLogs, tmp_path: Path
) -> None:
    (tmp_path / "config.json").touch()
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=60)
    console.print("[red]begins[/red]")
    with Live("step 0\nbusy 0%", console=console, auto_refresh=False) as live:
        for step in range(1, 50):
            live.update(f"step {step}\nbusy {step}%", refresh=True)
            if step == 7:
                console.print("a warning")
    drawn, shown = text.getvalue().encode(), b""
    with terminal() as main:
        with logs.streams(0) as (output, errors):
            assert os.isatty(output)
            assert not os.isatty(errors)
            for start in range(0, len(drawn), 11):  # also within codes of the terminal
                os.write(output, drawn[start : start + 11])
                assert logs.copy(1)
                shown += os.read(main, 1 << 16)
            os.write(output, b"".join(b"line %d\n" % number for number in range(40)))
            assert logs.copy(1)
        expected = "begins\na warning\nstep 49\nbusy 49%\nline 0\n"
        assert logs.path(0).read_text().startswith(expected)
        logs.close()
    assert shown.replace(b"\r\n", b"\n") == drawn
    lines = logs.path(0).read_text().splitlines()
    assert lines == [*expected.splitlines(), *(f"line {number}" for number in range(1, 40))]
