from typing import Annotated, Any

import pytest
import typer

from overspill.cli.flags import with_flags
from overspill.train.settings import Setting


def _setting(name: str, kind: type[Any], default: Any) -> Setting:
    return Setting(
        name, default, kind, default is None,
        help=f"The {name}.", section="kitchen", title="The kitchen",
    )  # fmt: skip


SETTINGS = [
    _setting("big_pots", int, 2),
    _setting("lid", bool, True),
    _setting("sign", str, "[a]\nb"),
    _setting("resume", bool, False),
]


def _run(*arguments: str) -> dict[str, Any]:
    app, given = typer.Typer(add_completion=False, rich_markup_mode="rich"), dict[str, Any]()
    what = {"what": Annotated[str | None, typer.Argument()]}
    app.command()(with_flags(lambda **values: given.update(values), what, SETTINGS))
    app(list(arguments), standalone_mode=False)
    return given


def test_what_is_not_given_is_none() -> None:
    nothing = {"what": None, "big_pots": None, "lid": None, "sign": None, "resume": None}
    assert _run() == {**nothing, "as_json": False}
    assert _run("soup", "--big-pots", "3", "--no-lid", "--resume", "--json") == {
        **nothing, "what": "soup", "big_pots": 3, "lid": False, "resume": True, "as_json": True,
    }  # fmt: skip


def test_help_shows_defaults_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    _run("--help")
    text = capsys.readouterr().out
    assert "The kitchen" in text
    for part in ("[2]", "[on]", r"[[a]\nb]", "--no-lid"):
        assert part in text
    assert "--no-resume" not in text
