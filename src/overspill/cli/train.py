"""`overspill train`: every setting of `TrainConfig` is a flag."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from overspill.cli.flags import with_flags
from overspill.train.config import TrainConfig, make_config, read_config_file, settings
from overspill.train.run_folder import find_run

_HELP = """Train a Mixture-of-Experts model that is larger than the GPU.

Experts live in host memory or on an SSD and visit the GPU one after another. \
The run's folder gets its config, metrics, pictures, a timeline for ui.perfetto.dev and \
checkpoints; Ctrl-C saves one.

[bold]Examples[/bold]

A small model on Python's own sources, on any machine:

  overspill train

A larger one than the GPU, on your own text:

  overspill train moe-m --experts 16 --gpu-memory 12GiB --data books/

With most experts on an SSD, from a config file, and again after Ctrl-C:

  overspill train run.toml --out runs/big --disk /nvme/spill

  overspill train --resume --out runs/big
"""
_SOURCE_HELP = "A preset (nano, moe-s, moe-m, moe-l, moe-xl, w1) or a config file (.toml, .json)."


def add_to(app: typer.Typer) -> None:
    source = typer.Argument(metavar="PRESET|CONFIG", help=_SOURCE_HELP)
    arguments = {"source": Annotated[str | None, source]}
    flags = [setting for setting in settings() if setting.name != "preset"]  # the argument itself
    app.command("train", help=_HELP)(with_flags(_train, arguments, flags))


def _train(source: str | None, as_json: bool, **flags: Any) -> None:
    config = resolve(source, {name: value for name, value in flags.items() if value is not None})

    # Torch takes seconds to import: only now, when the flags are known to be right.
    from rich.console import Console

    from overspill.train.progress import make_display, resume_command
    from overspill.train.summary import summary_lines
    from overspill.train.trainer import train

    # With --json the only thing on the standard output is the summary.
    display = make_display(Console(stderr=as_json))
    try:
        summary = train(config, display)
    except KeyboardInterrupt:
        out = config.run.out or "its folder"
        print(f"aborted; to go on: {resume_command(out)}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(dataclasses.asdict(summary)))
    else:
        for line in summary_lines(summary):
            display.say(line)
    if summary.interrupted:
        raise typer.Exit(130)


def resolve(source: str | None, flags: dict[str, Any]) -> TrainConfig:
    """The config of a run: flags win over `source`, which wins over the run that is resumed."""
    given: list[dict[str, Any]] = []
    if source is not None:
        is_file = source.endswith((".toml", ".json")) or Path(source).is_file()
        given.append(read_config_file(Path(source)) if is_file else {"preset": source})
    given.append(flags)
    config = make_config(*given)
    if not config.run.resume:
        return config
    folder = find_run(config.run.out, config.model.preset)
    place = {"out": str(folder.path)}
    if not folder.config.exists():  # killed before it wrote anything
        return make_config(*given, place)
    return make_config(read_config_file(folder.config), *given, place)
