"""Shared parts of `overspill train`, `finetune` and `pregate`: resuming, ranks, and the report at
the end."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer

from overspill.core.errors import ConfigError
from overspill.parallel.launcher import RankPlace, launch, rank_command
from overspill.parallel.rank_logs import RankLogs
from overspill.train.run_folder import RunFolder, choose_folder, find_run
from overspill.train.sections import RunConfig

if TYPE_CHECKING:
    from overspill.train.progress import Display
    from overspill.train.summary import Summary
    from overspill.train.team import Team

_INTERRUPTED = 130
C = TypeVar("C", bound=RunConfig)
R = TypeVar("R", bound=RunConfig, contravariant=True)

_WHICH_RUN = {"resume", "out", "preset", "checkpoint"}
"""Settings that determine the run to resume."""


def resolve_resume(kind: type[C], given: Sequence[Mapping[str, Any]]) -> C:
    """The config from layers of settings; with --resume they override the config of the resumed
    run."""
    flags = {name: value for layer in given for name, value in layer.items()}
    # the other flags may be valid only together with settings of the run
    which = kind.make({name: flags[name] for name in flags.keys() & _WHICH_RUN})
    if not which.run.resume:
        return kind.make(*given)
    folder = find_run(which.run.out, which.name)
    if folder.config.exists():
        saved = _read(kind, folder.config)
    elif which.run.out is None or any(each.keys() - {"resume", "out"} for each in given):
        saved = {}  # a run that was killed early has no config yet
    else:
        raise ConfigError(
            f"{folder.path} has no config: its run was stopped before it began; repeat the command "
            "that began it, with --resume or without"
        )
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


class Run(Protocol[R]):
    """A function that trains: `train` or `finetune`."""

    def __call__(self, config: R, display: "Display", *, team: "Team") -> "Summary": ...


class RanksNeeded(Exception):
    """The command must run in `count` processes; `app` starts them with `more` arguments, and
    starts them again up to `restarts` times from checkpoints in the folder of the run."""

    def __init__(
        self, count: int, folder: RunFolder, restarts: int = 0, more: Sequence[str] = ()
    ) -> None:
        super().__init__(count)
        self.count, self.folder, self.restarts, self.more = count, folder, restarts, more

    def newest_checkpoint(self) -> str | None:
        steps = self.folder.checkpoints.glob("step-*")
        return max((path.name for path in steps), default=None)


def check_ranks(config: RunConfig, flags: Mapping[str, Any]) -> None:
    """Raises RanksNeeded with --gpus, unless this process is a rank."""
    asked, place, restarts = config.memory.gpus, RankPlace.find(), config.run.max_restarts
    if place is None:
        if restarts and (asked in (None, 1) or config.run.out is None):
            raise ConfigError(
                f"--max-restarts {restarts} starts the ranks of --gpus again from checkpoints in "
                "--out; give both, or omit it"
            )
        if asked is not None and asked > 1:
            folder = choose_folder(config)
            # chosen once: ranks that start again find it
            more = ["--out", str(folder.path)] if config.run.out is None else []
            raise RanksNeeded(asked, folder, restarts, more)
        if (alone := flags.get("stage_gpus")) not in (None, 1):
            raise ConfigError(f"--stage-gpus {alone} needs several GPUs; give --gpus, or omit it")
        if (binding := flags.get("numa_binding")) is not None:
            raise ConfigError(
                f"--numa-binding {binding} binds the ranks of --gpus or torchrun; give --gpus, or "
                "omit it"
            )
    elif flags.get("gpus") not in (None, place.size):
        raise ConfigError(
            f"--gpus {asked}, but torchrun has started {place.size} ranks; omit the flag"
        )


def start_ranks(arguments: Sequence[str], needed: RanksNeeded) -> int:
    """Runs the command in several processes, and again after a failure; returns its exit code. A
    command that has written no checkpoint would fail again."""
    arguments = [*arguments, *needed.more]
    before = None if "--resume" in arguments else needed.newest_checkpoint()
    code = _launch(arguments, needed)
    for restart in range(1, needed.restarts + 1):
        newest = needed.newest_checkpoint()
        if code in (0, _INTERRUPTED) or newest in (None, before):
            break
        print(f"restart {restart} of {needed.restarts}, from {newest}", file=sys.stderr, flush=True)
        before = None
        code = _launch([*arguments, "--resume"], needed)
    return code


def _launch(arguments: Sequence[str], needed: RanksNeeded) -> int:
    logs = RankLogs(needed.folder.logs, after=needed.folder.config)
    try:
        code = launch(needed.count, rank_command(arguments, logs), logs)
    finally:
        logs.close()
    if code not in (0, _INTERRUPTED) and logs.path(0).exists():
        files = f"{logs.path(0)} to {logs.path(needed.count - 1).name}"
        print(f"the output of each rank is in {files}", file=sys.stderr, flush=True)
    return code


def run_and_report(config: C, run: Run[C], as_json: bool) -> None:
    """Train, alone or as one of several ranks, and print a summary."""
    place = RankPlace.find()
    from overspill.parallel.join import joined
    from overspill.train.team import Team

    try:
        if place is None:
            summary = _run(config, run, as_json, Team())
        else:
            memory = config.memory
            with joined(place, memory.device, config.stage_ranks, memory.numa_binding) as others:
                summary = _run(config, run, as_json, Team(others))
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    if summary.interrupted:
        raise typer.Exit(_INTERRUPTED)


def _run(config: C, run: Run[C], as_json: bool, team: "Team") -> "Summary":
    from rich.console import Console

    from overspill.train.progress import make_display, resume_command

    # With --json only the summary goes to the standard output.
    display = make_display(Console(stderr=as_json, quiet=not team.is_first))
    flat = config.flat()
    team.check_same({setting.flag: repr(flat[setting.name]) for setting in config.settings()})
    try:
        summary = run(config, display, team=team)
    except KeyboardInterrupt:
        out = config.run.out or "its folder"
        if team.is_first:
            print(f"aborted; to continue: {resume_command(out, config.command)}", file=sys.stderr)
        raise
    if as_json and team.is_first:
        print(json.dumps(dataclasses.asdict(summary)))
    elif not as_json:
        for line in summary.lines():
            display.say(line)
    return summary
