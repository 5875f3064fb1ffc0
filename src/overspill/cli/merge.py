"""`overspill merge`: adds a LoRA adapter to the weights of its base model."""

from pathlib import Path
from typing import Annotated

import typer

from overspill.cli.output import report

_HELP = """Write a LoRA adapter and its base model as one plain Hugging Face checkpoint.

The base model is copied file by file, and the tensors that the adapter changes are computed one \
at a time, so it may be larger than the memory. transformers and other programs load the result. \
overspill generate, chat and serve need no merged checkpoint: they take the adapter as it is.

[bold]Examples[/bold]

  overspill finetune Qwen3-30B-A3B pairs.jsonl --lora 16 --out runs/adapter

  overspill merge runs/adapter merged

Of an adapter that peft has written, whose base model has moved:

  overspill merge my-adapter merged --base models/Qwen3-30B-A3B
"""


def add_to(app: typer.Typer) -> None:
    app.command("merge", help=_HELP)(_merge)


def _merge(
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER",
            help="The folder of a LoRA adapter of peft, a repository of the hub, or the folder of "
            "a run of overspill finetune --lora.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder to write.")],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Folder or repository of the base model; default: the one that the adapter names.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only what was written, as JSON.")
    ] = False,
) -> None:
    # Importing torch takes seconds: only after the flags are checked.
    from overspill.core.sizes import format_size
    from overspill.models.huggingface.merge import Merged, merge

    def describe(done: Merged) -> str:
        return (
            f"wrote {done.out} ({format_size(done.bytes)}): {done.base} with {done.tensors} "
            f"tensors changed by {done.adapter}"
        )

    report(lambda bar: merge(adapter, out, base, progress=bar), as_json, describe)
