"""`overspill export`: converts a trained model to a Hugging Face checkpoint, and quantizes it."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from overspill.cli.arguments import complete_model
from overspill.cli.output import report
from overspill.core.packing import QUANTIZATIONS

_HELP = """Write a run's newest checkpoint as a Hugging Face checkpoint, or a checkpoint quantized.

Of a run, the model is written tensor by tensor, together with its tokenizer: as a Mixtral if it \
has gated experts in every layer and at least two experts per token, else as a class of \
Overspill, which transformers knows after [bold]import overspill[/bold].

With [bold]--quantize[/bold] the experts are packed in 4 or 8 bits, and MODEL may also be a \
Hugging Face checkpoint in bf16, fp16 or fp32. transformers and vLLM open most results.

[bold]Examples[/bold]

  overspill train nano --out runs/nano

  overspill export runs/nano exported

  overspill export Qwen/Qwen3-30B-A3B qwen3-int4 --quantize int4
"""


def add_to(app: typer.Typer) -> None:
    app.command("export", help=_HELP)(_export)


def _export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The folder of a run; with --quantize also that of a Hugging Face checkpoint, or "
            "a repository of the hub.",
            autocompletion=complete_model,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new folder to write.")],
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Pack the experts: mxfp4 (4.25 bits a weight), int4 (4.5) or fp8 (8).",
            show_default=False,
            autocompletion=lambda: [*QUANTIZATIONS],
        ),
    ] = None,
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
    from overspill.core.errors import ConfigError
    from overspill.core.sizes import format_size
    from overspill.train.export import Exported, export

    def describe(done: Exported) -> str:
        packed = f", experts in {quantize}" if quantize else ""
        use = f"AutoModelForCausalLM.from_pretrained({done.out!r})"
        if quantize:  # transformers cannot open all quantized models
            use = f"overspill generate {shlex.quote(done.out)} PROMPT"
        elif done.model_type == "overspill_gpt":
            use += " after import overspill"
        return (
            f"wrote {done.checkpoint} ({done.parameters:,} parameters{packed}) to {done.out} "
            f"({format_size(done.bytes)}): {use}"
        )

    out = out.expanduser()
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise ConfigError(f"--quantize {quantize} is unknown; give {' or '.join(QUANTIZATIONS)}")
    report(
        lambda bar: export(model, out, tokenizer, progress=bar, quantize=quantize),
        as_json,
        describe,
    )
