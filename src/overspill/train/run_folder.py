"""The folder of a run: its config, metrics, plots, timeline, checkpoints and logs of ranks."""

import contextlib
import dataclasses
import errno
import fcntl
import os
from pathlib import Path
from typing import Self

from overspill.core.errors import ConfigError, DiskError
from overspill.train.sections import RunConfig

_RUNS = Path("runs")


def is_run(path: Path) -> bool:
    """Whether `path` is the folder of a run, not of a checkpoint of Hugging Face."""
    return RunFolder(path).checkpoints.is_dir()


class RunFolder:
    """Paths of the files of a run. As a context manager it locks out other processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.loss_picture = path / "loss.png"
        self.timeline = path / "timeline.json.gz"
        self.timeline_picture = path / "timeline.png"
        self._lock_file = path / ".lock"
        self._lock = -1

    @property
    def holds_run(self) -> bool:
        return self.config.exists() or self.checkpoints.exists()

    def check_free(self) -> None:
        """Raise if the folder already holds a run."""
        if self.holds_run:
            raise ConfigError(
                f"--out {self.path} already holds a run; add --resume to continue it, or give "
                "another folder"
            )

    def __enter__(self) -> Self:
        self.check_links()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # The lock ends with the process: a killed run leaves nothing to clean up.
            self._lock = os.open(self._lock_file, os.O_WRONLY | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_writable()
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(
                f"--out {self.path} is in use by another process; wait, or give another folder"
            ) from error
        except OSError as error:
            os.close(self._lock)
            raise self._not_writable(error) from error
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is not None and os.listdir(self.path) == [self._lock_file.name]:
            # No run has started here: the name stays free.
            self._lock_file.unlink()
            with contextlib.suppress(OSError):  # a link or the root of a disk stays
                self.path.rmdir()
        os.close(self._lock)

    def check_links(self) -> None:
        """Raises if the folder, or that of the checkpoints, is a link to nothing: without the disk
        that it leads to, a run would start again from its first step."""
        for path in (self.path, self.checkpoints):
            if path.is_symlink() and not path.exists():
                raise DiskError(
                    f"{path} is a link to {os.readlink(path)}, which does not exist; mount its "
                    "disk, or remove the link"
                )

    def _check_writable(self) -> None:
        """Raise before training, not at the first checkpoint, if the folder cannot be written."""
        for path in (self.path, self.checkpoints):
            if path.exists() and not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"no files can be created in {path}")

    def write_config(self, config: RunConfig) -> None:
        """Writes `config` for --resume."""
        run = dataclasses.replace(config.run, out=str(self.path), resume=False)
        kept = dataclasses.replace(config, run=run)
        aside = self.config.with_suffix(".tmp")
        try:
            with open(aside, "w", encoding="utf-8") as out:
                out.write(kept.to_json())
                out.flush()
                os.fsync(out.fileno())
            os.replace(aside, self.config)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> DiskError:
        return DiskError(
            f"--out {self.path} cannot be written ({error.strerror}); give another folder"
        )


def choose_folder(config: RunConfig) -> RunFolder:
    """The folder for a run with this config."""
    out, name, resume = config.run.out, config.name, config.run.resume
    if resume:
        return find_run(out, name)
    if out is None:
        number = 1
        while (folder := RunFolder(_numbered(name, number))).path.exists():
            number += 1
        return folder
    folder = RunFolder(Path(out).expanduser())
    folder.check_free()
    return folder


def find_run(out: str | None, name: str) -> RunFolder:
    """The run to resume: the run in `out`, or the latest run of `name` under runs/."""
    if out is not None:
        folder = RunFolder(Path(out).expanduser())
        if not folder.path.is_dir():
            raise ConfigError(
                f"--resume: folder {out} does not exist; give the --out of an earlier run"
            )
        return folder
    number = 1
    while _numbered(name, number + 1).exists():
        number += 1
    folder = RunFolder(_numbered(name, number))
    if not folder.path.is_dir():
        raise ConfigError(
            f"--resume: no run of {name} in {_RUNS}/; give --out, or omit --resume to start one"
        )
    return folder


def _numbered(name: str, number: int) -> Path:
    return _RUNS / (name if number == 1 else f"{name}-{number}")
