"""Uses the command line once, when this module is imported: typer imports pydantic with the first
flag that it parses. The processes that are forked later have it."""

import contextlib
import io

from overspill.cli.main import app

with contextlib.redirect_stderr(io.StringIO()) as said:
    app(["train", "--steps", "not a number"])
assert "--steps" in said.getvalue()
