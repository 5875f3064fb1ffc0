"""`overspill generate`."""

import dataclasses
import json
from typing import Annotated, Any

import typer

from overspill.cli.arguments import Model
from overspill.cli.flags import with_flags
from overspill.cli.output import show
from overspill.serve.config import GenerateConfig

_HELP = """Answer a text with a Mixture-of-Experts model that may be larger than the GPU.

Most models continue the text; those with an encoder and a decoder translate or summarize it.

[bold]Examples[/bold]

  overspill generate runs/nano "def main("

  overspill generate allenai/OLMoE-1B-7B-0924 "The capital of France is" --gpu-memory 8GiB

A run of overspill finetune --lora, whose adapter is served with the model that it was trained on:

  overspill generate runs/adapter "2 + 2 = "

A translation:

  overspill generate runs/nllb "The cat sleeps." --src-lang eng_Latn --tgt-lang fra_Latn
"""


def add_to(app: typer.Typer) -> None:
    prompt = Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="The text to continue, or the source of an encoder."),
    ]
    command = with_flags(_generate, {"model": Model, "prompt": prompt}, GenerateConfig.settings())
    app.command("generate", help=_HELP)(command)


def _generate(model: str, prompt: str, as_json: bool, **flags: Any) -> None:
    given = {name: value for name, value in flags.items() if value is not None}
    config = GenerateConfig.make(given)
    params = config.params()
    with config.open(model) as llm:
        if as_json:
            (result,) = llm.generate([prompt], params)
            print(json.dumps({**dataclasses.asdict(result), "stats": llm.stats()}))
            return
        try:
            for piece in llm.stream(prompt, params):
                show(piece.text)
        except KeyboardInterrupt:
            print()
            raise typer.Exit(130) from None
        print()
