"""The `overspill` command. One file per command; none imports torch before it runs."""

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from overspill.cli import (
    chat,
    create,
    export,
    finetune,
    generate,
    merge,
    pregate,
    probe,
    serve,
    train,
)  # fmt: skip
from overspill.cli.runs import RanksNeeded, start_ranks
from overspill.core.errors import OverspillError

commands = typer.Typer(
    name="overspill",
    help="Train, fine-tune and serve Mixture-of-Experts models that are larger than the GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
train.add_to(commands)
finetune.add_to(commands)
pregate.add_to(commands)
generate.add_to(commands)
chat.add_to(commands)
serve.add_to(commands)
export.add_to(commands)
create.add_to(commands)
merge.add_to(commands)
probe.add_to(commands)


def _print_version(asked: bool) -> None:
    if asked:
        try:
            typer.echo(f"overspill {metadata.version('overspill')}")
        except metadata.PackageNotFoundError:
            typer.echo("overspill, run from its sources without being installed")
        raise typer.Exit


@commands.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


def app(arguments: Sequence[str] | None = None) -> int:
    """The installed `overspill`: runs a command and returns the exit code.

    The code is 2 for errors of the user, with one line on the standard error that names the fix,
    and 130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = commands(args=given, prog_name="overspill", standalone_mode=False)
    except RanksNeeded as needed:
        return start_ranks(given, needed)
    except OverspillError as error:
        return _fail(str(error))
    except KeyboardInterrupt:  # such as while a model is loaded
        return 130
    except Exception as error:
        # A wrong flag. Its class has changed name and module between versions of typer.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        return _fail(f"{message()} (see overspill --help)")
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(app())
