"""`overspill train`: every setting of `TrainConfig` is a flag."""

from pathlib import Path
from typing import Annotated, Any

import typer

from overspill.cli.arguments import complete_preset
from overspill.cli.flags import with_flags
from overspill.cli.runs import check_ranks, resolve_resume, run_and_report
from overspill.train.config import TrainConfig

_HELP = """Train a Mixture-of-Experts model that is larger than the GPU.

Experts are kept in host memory or on an SSD and uploaded to the GPU when needed. \
The run's folder gets its config, metrics, plots, a timeline for ui.perfetto.dev and \
checkpoints; Ctrl-C saves one.

[bold]Examples[/bold]

A small model on Python's own sources, on any machine:

  overspill train

A model larger than the GPU, on your own text:

  overspill train moe-m --experts 16 --gpu-memory 12GiB --data books/

Most experts on an SSD, settings from a config file, and resumed after Ctrl-C:

  overspill train run.toml --out runs/big --disk /nvme/spill

  overspill train --resume --out runs/big

Four GPUs, which divide the experts and the batch:

  overspill train w1 --gpus 4 --gpu-memory 20GiB
"""
_SOURCE_HELP = (
    "A preset (nano, moe-s, moe-m, moe-l, moe-xl, w1, or another GPT-MoE of overspill create "
    "--list) or a config file (.toml, .json)."
)


def add_to(app: typer.Typer) -> None:
    source = typer.Argument(
        metavar="PRESET|CONFIG", help=_SOURCE_HELP, autocompletion=complete_preset
    )
    arguments = {"source": Annotated[str | None, source]}
    flags = [setting for setting in TrainConfig.settings() if setting.name != "preset"]
    app.command("train", help=_HELP)(with_flags(_train, arguments, flags))


def _train(source: str | None, as_json: bool, **flags: Any) -> None:
    given = {name: value for name, value in flags.items() if value is not None}
    config = resolve(source, given)
    check_ranks(config, given)
    # Importing torch takes seconds: only after the flags are checked.
    from overspill.train.trainer import train

    run_and_report(config, train, as_json)


def resolve(source: str | None, flags: dict[str, Any]) -> TrainConfig:
    """The config of a run: flags override `source`, which overrides the run that is resumed."""
    given: list[dict[str, Any]] = []
    if source is not None:
        is_file = source.endswith((".toml", ".json")) or Path(source).is_file()
        given.append(TrainConfig.read_file(Path(source)) if is_file else {"preset": source})
    return resolve_resume(TrainConfig, [*given, flags])
