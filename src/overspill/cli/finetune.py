"""`overspill finetune`: every setting of `FinetuneConfig` is a flag."""

import dataclasses
import json
import sys
from typing import Annotated, Any

import typer

from overspill.cli.flags import with_flags
from overspill.core.errors import ConfigError
from overspill.train.finetune.config import (
    FinetuneConfig,
    make_config,
    read_config_file,
    settings,
)
from overspill.train.run_folder import find_run

_HELP = """Fine-tune a Hugging Face Mixture-of-Experts checkpoint that is larger than the GPU.

DATA are .jsonl files (also .gz, or folders of them) with "text", with "prompt" and "completion", \
or with chat "messages"; or .tsv files with the columns sentence and label. The run's folder gets \
its config, metrics, pictures, checkpoints to resume from, and the best and the final model as \
plain Hugging Face checkpoints.

[bold]Examples[/bold]

All parameters, on one 24 GB GPU:

  overspill finetune Mixtral-8x7B-v0.1 chats.jsonl --gpu-memory 22GiB --disk /nvme/spill \
--state-dtype bf16 --batch 1 --accumulate 8

A classifier, with its accuracy before and after:

  overspill finetune OLMoE-1B-7B train.tsv --labels negative,positive --eval-data dev.tsv

Adapters alone, for two passes over the data:

  overspill finetune Qwen3-30B-A3B pairs.jsonl --lora 16 --epochs 2 --out runs/adapter

Again after Ctrl-C:

  overspill finetune --resume --out runs/adapter
"""
_ARGUMENTS = ("checkpoint", "data")


def add_to(app: typer.Typer) -> None:
    checkpoint = typer.Argument(
        metavar="CHECKPOINT", help="The folder of a Hugging Face checkpoint.", show_default=False
    )
    data = typer.Argument(
        metavar="DATA", help="Files or folders of .jsonl or .tsv.", show_default=False
    )
    arguments = {
        "checkpoint": Annotated[str | None, checkpoint],
        "data": Annotated[list[str] | None, data],
    }
    flags = [setting for setting in settings() if setting.name not in _ARGUMENTS]
    app.command("finetune", help=_HELP)(with_flags(_finetune, arguments, flags))


def _finetune(as_json: bool, **flags: Any) -> None:
    # An argument that was not given is None, or an empty list.
    config = resolve({name: value for name, value in flags.items() if value not in (None, [])})

    # Torch takes seconds to import: only now, when the flags are known to be right.
    from rich.console import Console

    from overspill.train.finetune.finetuner import COMMAND, finetune, finetune_lines
    from overspill.train.progress import make_display, resume_command

    # With --json the only thing on the standard output is the summary.
    display = make_display(Console(stderr=as_json))
    try:
        summary = finetune(config, display)
    except KeyboardInterrupt:
        out = config.run.out or "its folder"
        print(f"aborted; to go on: {resume_command(out, COMMAND)}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(dataclasses.asdict(summary)))
    else:
        for line in finetune_lines(summary):
            display.say(line)
    if summary.interrupted:
        raise typer.Exit(130)


def resolve(flags: dict[str, Any]) -> FinetuneConfig:
    """The config of a run: flags win over the run that is resumed."""
    config = make_config(flags)
    if not config.run.resume:
        return config
    if config.run.out is None and not config.model.checkpoint:
        raise ConfigError("--resume needs the run to go on with; give its folder with --out")
    folder = find_run(config.run.out, config.name)
    place = {"out": str(folder.path)}
    if not folder.config.exists():  # killed before it wrote anything
        return make_config(flags, place)
    return make_config(read_config_file(folder.config), flags, place)
