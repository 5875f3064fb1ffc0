"""The measurement of loading GGUF files runs."""

import importlib
import sys
from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
def test_it_prints_a_row_for_each_type(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gguf_load.py", "--smoke", "--types", "Q4_K", "MXFP4"])
    importlib.import_module("gguf_load").main()
    _, *rows = capsys.readouterr().out.splitlines()[-5:]
    assert [row.split()[:2] for row in rows] == [
        [kind, packed] for kind in ("Q4_K", "MXFP4") for packed in ("False", "True")
    ]
