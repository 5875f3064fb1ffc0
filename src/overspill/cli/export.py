"""`overspill export`: converts a trained model to a Hugging Face checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from overspill.cli.arguments import complete_model
from overspill.cli.output import report

_HELP = """Write a run's newest checkpoint as a plain Hugging Face checkpoint.

The model is written tensor by tensor, together with its tokenizer: as a Mixtral if it has gated \
experts in every layer and at least two experts per token, else as a class of Overspill, which \
transformers knows after [bold]import overspill[/bold].

[bold]Example[/bold]

  overspill train nano --out runs/nano

  overspill export runs/nano exported
"""


def add_to(app: typer.Typer) -> None:
    app.command("export", help=_HELP)(_export)


def _export(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run.", autocompletion=complete_model),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder to write.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="`bytes` or a tokenizer.json; default: the tokenizer of the run.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only what was written, as JSON.")
    ] = False,
) -> None:
    # Importing torch takes seconds: only after the flags are checked.
    from overspill.core.sizes import format_size
    from overspill.train.export import Exported, export

    def describe(done: Exported) -> str:
        return (
            f"wrote {done.checkpoint} ({done.parameters:,} parameters) to {done.out} "
            f"({format_size(done.bytes)}): AutoModelForCausalLM.from_pretrained({done.out!r})"
            + ("" if done.model_type == "mixtral" else " after import overspill")
        )

    run, out = run.expanduser(), out.expanduser()
    report(lambda bar: export(run, out, tokenizer, progress=bar), as_json, describe)
