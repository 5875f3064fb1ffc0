"""`overspill generate` and `overspill chat`."""

import dataclasses
import json
import sys
from typing import Annotated, Any

import typer

from overspill.cli.flags import with_flags
from overspill.core.visible import visible
from overspill.serve.config import ServeConfig

_MODEL = (
    "The folder of a Hugging Face checkpoint, a repository of the hub, or the folder of a run of "
    "overspill train."
)
_GENERATE = """Continue a text with a Mixture-of-Experts model that may be larger than the GPU.

[bold]Examples[/bold]

  overspill generate runs/nano "def main("

  overspill generate allenai/OLMoE-1B-7B-0924 "The capital of France is" --gpu-memory 8GiB
"""
_CHAT = """Chat with a Mixture-of-Experts model that may be larger than the GPU.

The model's chat template is used; a model without one continues the text. Ctrl-C ends an answer, \
/new begins a new conversation, Ctrl-D or /exit ends.

[bold]Examples[/bold]

  overspill chat runs/nano

  overspill chat Qwen/Qwen3-30B-A3B --gpu-memory 8GiB --system "Answer briefly."
"""


def add_to(app: typer.Typer) -> None:
    settings = ServeConfig.settings()
    model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
    prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")]
    system = Annotated[str | None, typer.Option(help="The system message.", show_default=False)]
    generate = with_flags(_generate, {"model": model, "prompt": prompt}, settings)
    chat = with_flags(_chat, {"model": model, "system": system}, settings)
    app.command("generate", help=_GENERATE)(generate)
    app.command("chat", help=_CHAT)(chat)


def _config(flags: dict[str, Any]) -> ServeConfig:
    return ServeConfig.make({name: value for name, value in flags.items() if value is not None})


def _show(text: str) -> None:
    """A terminal must not obey what a model writes; a file gets the text as it is."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def _generate(model: str, prompt: str, as_json: bool, **flags: Any) -> None:
    config = _config(flags)
    params = config.params()
    with config.open(model) as llm:
        if as_json:
            (result,) = llm.generate([prompt], params)
            print(json.dumps({**dataclasses.asdict(result), "stats": llm.stats()}))
            return
        try:
            for piece in llm.stream(prompt, params):
                _show(piece.text)
        except KeyboardInterrupt:
            print()
            raise typer.Exit(130) from None
        print()


def _chat(model: str, system: str | None, as_json: bool, **flags: Any) -> None:
    """With --json each answer is one line of JSON."""
    config = _config(flags)
    params = config.params()
    from overspill.core.errors import OverspillError
    from overspill.serve.chat import Chat

    with config.open(model) as llm:
        chat = Chat(llm, params, system)
        while (question := _read()) is not None:
            if question == "/new":
                chat.forget()
                continue
            try:
                pieces = chat.ask(question)
                if as_json:
                    print(json.dumps({"answer": "".join(pieces)}), flush=True)
                    continue
                for text in pieces:
                    _show(text)
            except KeyboardInterrupt:
                pieces.close()
            except OverspillError as error:
                _show(f"error: {error}")
            if not as_json:
                print()


def _read() -> str | None:
    """The next question; None at the end."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
            return None
        if line == "/exit":
            return None
        if line:
            return line
