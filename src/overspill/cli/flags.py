"""Makes the flags of a command from settings."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, get_args

import typer

from overspill.train.settings import Setting

_NO_NEGATION = ("resume", "again")


def with_flags(
    command: Callable[..., None], arguments: Mapping[str, Any], settings: Sequence[Setting]
) -> Callable[..., None]:
    """`command` with a signature that typer reads: its arguments, a flag per setting and --json.

    An omitted flag is None: a default must not override the value of a config file.
    """

    def run(**values: Any) -> None:
        command(**values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    as_json = Annotated[bool, typer.Option("--json", help="Print only the result, as JSON.")]
    parameters = [
        inspect.Parameter(name, keyword, default=_default(annotation), annotation=annotation)
        for name, annotation in arguments.items()
    ]
    parameters += [_flag(setting) for setting in settings]
    parameters.append(inspect.Parameter("as_json", keyword, default=False, annotation=as_json))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _default(annotation: Any) -> Any:
    """The default of an argument: None if it may be omitted."""
    kind = get_args(annotation)[0]
    return None if type(None) in get_args(kind) else inspect.Parameter.empty


def _flag(setting: Setting) -> inspect.Parameter:
    shown = setting.help
    if setting.default not in (None, ()) and setting.kind is not bool:
        # an unescaped bracket would open markup in the help text
        default = str(setting.default).replace("\n", "\\n").replace("[", "\\[")
        shown += f" [dim]\\[{default}][/dim]"
    names = [setting.flag]
    if setting.kind is bool:
        names = [f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"]
        if setting.name in _NO_NEGATION:
            names = [setting.flag]
        elif setting.default is not None:
            shown += f" [dim]\\[{'on' if setting.default else 'off'}][/dim]"
    option = typer.Option(
        *names,
        help=shown,
        show_default=False,
        rich_help_panel=setting.title,
        autocompletion=_choices(setting) if setting.choices else None,
    )
    kind: Any = list[str] if setting.kind is tuple else setting.kind
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _choices(setting: Setting) -> Callable[[str], list[str]]:
    """Completion of a setting's values by the shell."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in setting.choices if choice.startswith(incomplete)]

    return complete
