"""`overspill train`: every setting of `TrainConfig` is a flag."""

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from overspill.train.config import Setting, TrainConfig, make_config, read_config_file, settings
from overspill.train.run_folder import find_run

_HELP = """Train a Mixture-of-Experts model that is larger than the GPU.

Experts live in host memory or on an SSD and visit the GPU one after another. \
The run's folder gets its config, metrics, pictures, a timeline for ui.perfetto.dev and \
checkpoints; Ctrl-C saves one.

[bold]Examples[/bold]

A small model on Python's own sources, on any machine:

  overspill train

A larger one than the GPU, on your own text:

  overspill train moe-m --experts 16 --gpu-memory 12GiB --data books/

With most experts on an SSD, from a config file, and again after Ctrl-C:

  overspill train run.toml --out runs/big --disk /nvme/spill

  overspill train --resume --out runs/big
"""
_SOURCE_HELP = "A preset (nano, moe-s, moe-m, moe-l, moe-xl, w1) or a config file (.toml, .json)."


def add_to(app: typer.Typer) -> None:
    app.command("train", help=_HELP)(_with_flags(_train))


def _train(source: str | None, as_json: bool, **flags: Any) -> None:
    config = resolve(source, {name: value for name, value in flags.items() if value is not None})

    # Torch takes seconds to import: only now, when the flags are known to be right.
    from rich.console import Console

    from overspill.train.progress import make_display, resume_command
    from overspill.train.trainer import summary_lines, train

    # With --json the only thing on the standard output is the summary.
    display = make_display(Console(stderr=as_json))
    try:
        summary = train(config, display)
    except KeyboardInterrupt:
        out = config.run.out or "its folder"
        print(f"aborted; to go on: {resume_command(out)}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(dataclasses.asdict(summary)))
    else:
        for line in summary_lines(summary):
            display.say(line)
    if summary.interrupted:
        raise typer.Exit(130)


def resolve(source: str | None, flags: dict[str, Any]) -> TrainConfig:
    """The config of a run: flags win over `source`, which wins over the run that is resumed."""
    given: list[dict[str, Any]] = []
    if source is not None:
        is_file = source.endswith((".toml", ".json")) or Path(source).is_file()
        given.append(read_config_file(Path(source)) if is_file else {"preset": source})
    given.append(flags)
    config = make_config(*given)
    if not config.run.resume:
        return config
    folder = find_run(config.run.out, config.model.preset)
    place = {"out": str(folder.path)}
    if not folder.config.exists():  # killed before it wrote anything
        return make_config(*given, place)
    return make_config(read_config_file(folder.config), *given, place)


def _with_flags(command: Any) -> Any:
    """`command` with a signature that typer reads: the source, --json and a flag per setting."""

    def run(**values: Any) -> None:
        command(values.pop("source"), values.pop("as_json"), **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    source = Annotated[str | None, typer.Argument(metavar="PRESET|CONFIG", help=_SOURCE_HELP)]
    as_json = Annotated[
        bool, typer.Option("--json", help="Print the summary at the end as JSON, and only that.")
    ]
    parameters = [inspect.Parameter("source", keyword, default=None, annotation=source)]
    for setting in settings():
        if setting.name != "preset":  # the argument itself
            parameters.append(_flag(setting))
    parameters.append(inspect.Parameter("as_json", keyword, default=False, annotation=as_json))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _flag(setting: Setting) -> inspect.Parameter:
    """None means "not given", so that a config file's value is not overwritten by a default."""
    shown = setting.help
    if setting.default is not None and setting.kind is not bool:
        shown += f" [dim]\\[{setting.default}][/dim]"
    names = [setting.flag]
    if setting.kind is bool:
        names = [f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"]
        if setting.name == "resume":
            names = [setting.flag]
        elif setting.default is not None:
            shown += f" [dim]\\[{'on' if setting.default else 'off'}][/dim]"
    option = typer.Option(*names, help=shown, show_default=False, rich_help_panel=setting.title)
    kind: Any = setting.kind
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )
