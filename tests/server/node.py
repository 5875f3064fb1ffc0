"""Runs modules of the web page in Node.js, with as much of a document as they need."""

import functools
import json
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

_PAGE = Path(__file__).parents[2] / "src" / "overspill" / "server" / "page"
_FAKE = Path(__file__).parent / "page" / "fake_dom.js"
_LEAST_VERSION = 18


@functools.cache
def _problem() -> str | None:
    """Why modules of the page cannot run here; None if they can."""
    program = shutil.which("node")
    if program is None:
        return "node is not installed: modules of the page cannot run"
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < _LEAST_VERSION:
        return f"node {version} is older than {_LEAST_VERSION}: modules of the page cannot run"
    return None


def run(module: str, code: str, data: Any = None) -> Any:
    """What `code` returns, in which `page` are the exports of a module of the page, `fake` those of
    the fake document, and `data` is this data. Skips the test without Node.js."""
    if problem := _problem():
        pytest.skip(problem)
    script = f"""
        import * as fake from "./fake_dom.js";
        const page = await import("./{module}");
        const data = {json.dumps(data)};
        const result = await (async () => {{ {code} }})();
        console.log(JSON.stringify(result));
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file in (*_PAGE.glob("*.js"), _FAKE):
            shutil.copy(file, folder)
        (folder / "package.json").write_text('{"type": "module"}')
        (folder / "script.js").write_text(script, encoding="utf-8")
        done = subprocess.run(
            ["node", "script.js"], cwd=folder, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
