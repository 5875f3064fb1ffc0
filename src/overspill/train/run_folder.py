"""A run is a folder: its config, metrics, pictures, timeline and checkpoints."""

import dataclasses
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from overspill.core.errors import ConfigError, DiskError
from overspill.train.settings import Config, to_json

_RUNS = Path("runs")


class RunConfig(Config, Protocol):
    """What a folder needs of a config: its section `run` has out and resume."""

    @property
    def run(self) -> Any: ...

    @property
    def name(self) -> str: ...


class RunFolder:
    """The files of a run, by name; while entered, no other process trains in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.loss_picture = path / "loss.png"
        self.timeline = path / "timeline.json.gz"
        self.timeline_picture = path / "timeline.png"
        self._lock_file = path / ".lock"
        self._lock = -1

    @property
    def holds_run(self) -> bool:
        return self.config.exists() or self.checkpoints.exists()

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # The lock goes with the process, so a killed run leaves nothing to clean up.
            self._lock = os.open(self._lock_file, os.O_WRONLY | os.O_CREAT, 0o644)
        except OSError as error:
            raise DiskError(
                f"--out {self.path} cannot be written ({error.strerror}); give another folder"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(
                f"--out {self.path} is in use by another process; wait for it, or give another "
                "folder"
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and os.listdir(self.path) == [self._lock_file.name]:
            # Nothing ever ran here: the next attempt finds the name free.
            self._lock_file.unlink()
            self.path.rmdir()
        os.close(self._lock)

    def write_config(self, config: RunConfig) -> None:
        """Keep `config` as a resumed run will read it."""
        run = dataclasses.replace(config.run, out=str(self.path), resume=False)
        kept = dataclasses.replace(config, run=run)
        aside = self.config.with_suffix(".tmp")
        try:
            with open(aside, "w", encoding="utf-8") as out:
                out.write(to_json(kept))
                out.flush()
                os.fsync(out.fileno())
            os.replace(aside, self.config)
        except OSError as error:
            raise DiskError(
                f"--out {self.path} cannot be written ({error.strerror}); give another folder"
            ) from error


def choose_folder(config: RunConfig) -> RunFolder:
    """The folder a run with this config goes to."""
    out, name, resume = config.run.out, config.name, config.run.resume
    if resume:
        return find_run(out, name)
    if out is None:
        number = 1
        while (folder := RunFolder(_numbered(name, number))).path.exists():
            number += 1
        return folder
    folder = RunFolder(Path(out).expanduser())
    if folder.holds_run:
        raise ConfigError(
            f"--out {out} holds a run already; add --resume to go on with it, or give another "
            "folder"
        )
    return folder


def find_run(out: str | None, name: str) -> RunFolder:
    """The run to resume: the one in `out`, or the latest of `name` under runs/."""
    if out is not None:
        folder = RunFolder(Path(out).expanduser())
        if not folder.path.is_dir():
            raise ConfigError(
                f"--resume: there is no folder {out}; give the --out of a run that was started"
            )
        return folder
    number = 1
    while _numbered(name, number + 1).exists():
        number += 1
    folder = RunFolder(_numbered(name, number))
    if not folder.path.is_dir():
        raise ConfigError(
            f"--resume: there is no run of {name} under {_RUNS}/; give --out, or leave --resume "
            "out to begin one"
        )
    return folder


def _numbered(name: str, number: int) -> Path:
    return _RUNS / (name if number == 1 else f"{name}-{number}")
