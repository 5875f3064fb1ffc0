"""`overspill export`: a trained model for everything that reads Hugging Face checkpoints."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

_HELP = """Write a run's newest checkpoint as a plain Hugging Face checkpoint.

The model becomes a Mixtral, streamed tensor by tensor, with its tokenizer beside it. It must have \
been trained with gated experts in every layer and at least two per token.

[bold]Example[/bold]

  overspill train nano --gated --out runs/gated

  overspill export runs/gated exported
"""


def add_to(app: typer.Typer) -> None:
    app.command("export", help=_HELP)(_export)


def _export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; a new one.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="`bytes` or a tokenizer.json, should the run's own no longer be where it was.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as JSON, and only that.")
    ] = False,
) -> None:
    # Torch takes seconds to import: only now, when the flags are known to be right.
    from overspill.core.sizes import format_size
    from overspill.models.progress_bar import TerminalProgress
    from overspill.train.export import export

    bar = TerminalProgress()
    try:
        done = export(run.expanduser(), out.expanduser(), tokenizer, progress=bar)
    finally:
        bar.stop()
    if as_json:
        print(json.dumps(dataclasses.asdict(done)))
    else:
        print(
            f"{done.checkpoint}, {done.parameters:,} parameters, is now {done.out} "
            f"({format_size(done.bytes)}): AutoModelForCausalLM.from_pretrained({done.out!r})"
        )
