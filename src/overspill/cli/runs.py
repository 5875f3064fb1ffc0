"""What `overspill train`, `finetune` and `pregate` share: resuming, and the report at the end."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from overspill.core.errors import ConfigError
from overspill.train.run_folder import find_run
from overspill.train.sections import RunConfig

if TYPE_CHECKING:
    from overspill.train.progress import Display
    from overspill.train.summary import Summary

C = TypeVar("C", bound=RunConfig)


def resolve_resume(kind: type[C], given: Sequence[Mapping[str, Any]]) -> C:
    """The config from layers of settings; with --resume they override the config of that run."""
    config = kind.make(*given)
    if not config.run.resume:
        return config
    folder = find_run(config.run.out, config.name)
    # A run that was killed early has no config yet.
    saved = _read(kind, folder.config) if folder.config.exists() else {}
    return kind.make(saved, *given, {"out": str(folder.path)})


def _read(kind: type[C], file: Path) -> Mapping[str, Any]:
    try:
        saved = kind.read_file(file)
        kind.make(saved)
    except ConfigError as error:
        raise ConfigError(
            f"{file.parent} cannot be resumed by overspill {kind.command} ({error}); use the "
            "command that began it"
        ) from error
    return saved


def run_and_report(config: C, run: "Callable[[C, Display], Summary]", as_json: bool) -> None:
    from rich.console import Console

    from overspill.train.progress import make_display, resume_command

    # With --json only the summary goes to the standard output.
    display = make_display(Console(stderr=as_json))
    try:
        summary = run(config, display)
    except KeyboardInterrupt:
        out = config.run.out or "its folder"
        print(f"aborted; to continue: {resume_command(out, config.command)}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(dataclasses.asdict(summary)))
    else:
        for line in summary.lines():
            display.say(line)
    if summary.interrupted:
        raise typer.Exit(130)
