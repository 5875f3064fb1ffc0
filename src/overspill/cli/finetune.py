"""`overspill finetune`: every setting of `FinetuneConfig` is a flag."""

from pathlib import Path
from typing import Annotated, Any

import typer

from overspill.cli.arguments import complete_model
from overspill.cli.flags import with_flags
from overspill.cli.runs import check_ranks, resolve_resume, run_and_report
from overspill.core.errors import ConfigError
from overspill.models.huggingface.checks import check_checkpoint, check_tokenizer
from overspill.parallel.launcher import RankPlace
from overspill.train.finetune.config import FinetuneConfig
from overspill.train.run_folder import is_run

_HELP = """Fine-tune a Hugging Face Mixture-of-Experts checkpoint that is larger than the GPU.

DATA are .jsonl files (also .gz, or folders of them) with "text", with "prompt" and "completion", \
with chat "messages", or as of Alpaca or ShareGPT; .tsv files with the columns sentence and \
label; or plain text, where "stdlib" stands for the sources of Python's standard library. The \
run's folder gets its config, metrics, plots, checkpoints to resume from, and the best and the \
final model as plain Hugging Face checkpoints, or as adapters with --lora. overspill chat, \
generate and serve take its folder.

[bold]Examples[/bold]

All parameters, on one 24 GB GPU:

  overspill finetune Mixtral-8x7B-v0.1 chats.jsonl --gpu-memory 22GiB --disk /nvme/spill \
--state-dtype bf16 --batch 1 --accumulate 8

A classifier; reports the accuracy before and after:

  overspill finetune OLMoE-1B-7B train.tsv --labels negative,positive --eval-data dev.tsv

Questions with short answers; reports exact match and F1 of what the model generates:

  overspill finetune OLMoE-1B-7B squad.jsonl --eval-data dev.jsonl --metric em,f1

LoRA adapters, for two passes over the data:

  overspill finetune Qwen3-30B-A3B pairs.jsonl --lora 16 --epochs 2 --out runs/adapter

Adapters of attention, and smaller ones of the experts:

  overspill finetune Qwen3-30B-A3B pairs.jsonl --lora 16 --lora-experts --lora-experts-rank 4

The adapter with its base model, tried, and as one checkpoint:

  overspill generate runs/adapter "2 + 2 = "

  overspill merge runs/adapter merged

Resumed after Ctrl-C:

  overspill finetune --resume --out runs/adapter

Four GPUs, which divide the experts and the batch:

  overspill finetune Mixtral-8x7B-v0.1 chats.jsonl --gpus 4
"""
_ARGUMENTS = ("checkpoint", "data")


def add_to(app: typer.Typer) -> None:
    add_command(app, FinetuneConfig, _HELP)


def add_command(app: typer.Typer, kind: type[FinetuneConfig], text: str) -> None:
    """Add the command whose flags are the settings of `kind`."""
    checkpoint = typer.Argument(
        metavar="CHECKPOINT",
        help="The folder of a Hugging Face checkpoint or of a run of overspill train, or a GGUF "
        "file.",
        show_default=False,
        autocompletion=complete_model,
    )
    data = typer.Argument(
        metavar="DATA",
        help='Files or folders of .jsonl, .tsv or text; or "stdlib".',
        show_default=False,
    )
    arguments = {
        "checkpoint": Annotated[str | None, checkpoint],
        "data": Annotated[list[str] | None, data],
    }
    flags = [setting for setting in kind.settings() if setting.name not in _ARGUMENTS]

    def run(as_json: bool, **values: Any) -> None:
        # An omitted argument is None or an empty list.
        given = {n: v for n, v in values.items() if v not in (None, [])}
        config = resolve(given, kind)
        if RankPlace.find() is None:  # ranks say what is wrong only once, later
            _check_checkpoint(config)
        check_ranks(config, given)
        # Importing torch takes seconds: only after the flags are checked.
        from overspill.train.finetune.finetuner import finetune

        run_and_report(config, finetune, as_json)

    app.command(kind.command, help=text)(with_flags(run, arguments, flags))


def resolve(flags: dict[str, Any], kind: type[FinetuneConfig] = FinetuneConfig) -> FinetuneConfig:
    """The config of a run: flags override the settings of the run that is resumed."""
    if flags.get("resume") and "out" not in flags and "checkpoint" not in flags:
        raise ConfigError("--resume needs the folder of the run to continue; give it with --out")
    return resolve_resume(kind, [flags])


def _check_checkpoint(config: FinetuneConfig) -> None:
    """Raise if the checkpoint cannot be loaded or has no tokenizer."""
    checkpoint, tokenizer = config.model.checkpoint, config.model.tokenizer
    if not checkpoint or is_run(Path(checkpoint).expanduser()):
        return
    folder = check_checkpoint(checkpoint)
    if tokenizer is None:
        check_tokenizer(folder, "CHECKPOINT")
    else:
        check_tokenizer(Path(tokenizer).expanduser(), "--tokenizer")
