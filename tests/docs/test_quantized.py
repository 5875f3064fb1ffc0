"""docs/quantized.md: its code runs, and it names all formats."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.cli.main import app
from overspill.models.huggingface.packed.config import METHODS
from tests.slow import slow_names

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quantized.md").read_text()
SCRIPT = str(ROOT / "examples" / "make_tiny_checkpoint.py")


def test_its_code_runs_and_all_models_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^python (examples/.*?) *#", PAGE, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", command.split())
    runpy.run_path(SCRIPT, run_name="__main__")
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), names)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        logits = names["plain"](ids).logits
        plain = AutoModelForCausalLM.from_pretrained("tiny-plain")
        torch.testing.assert_close(plain(ids).logits, logits, rtol=1e-4, atol=1e-5)
        for name in ("packed", "quantized"):
            torch.testing.assert_close(names[name](ids).logits, logits, rtol=1e-4, atol=1e-5)
    for name in ("plain", "packed", "quantized"):
        names[name].overspill.close()


def _formats() -> list[str]:
    """All names of `--format` on the page."""
    (table,) = re.findall(r"\| format \|.*?\n\n", PAGE, re.DOTALL)
    cells = [row.split("|")[4] for row in table.strip().splitlines()[2:]]
    found = re.findall(r"`([a-z0-9-]+)`", " ".join(cells))
    return [*found, *dict.fromkeys(re.findall(r"`(gguf-[a-z0-9_]+)`", PAGE))]


_FEW = ("mxfp4", "awq", "nvfp4-compressed", "gguf-q4_k")


@pytest.mark.parametrize("name", slow_names(_formats(), *{*_formats()} - {*_FEW}))
def test_the_example_writes_each_format_and_it_is_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packed and unpacked, with the same answers."""
    monkeypatch.setattr(sys, "argv", [SCRIPT, str(tmp_path / "tiny"), "--format", name])
    runpy.run_path(SCRIPT, run_name="__main__")
    flags = ["--max-tokens=4", "--temperature=0", "--device=cpu", "--dtype=fp32", "--json"]
    answers = []
    for more in (["--no-packed"], []):
        capsys.readouterr()
        assert app(["generate", str(tmp_path / "tiny"), "Experts", *flags, *more]) == 0
        answers.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert len(answers[0]) == 4
    assert answers[0] == answers[1]


def test_it_names_every_method_and_every_format() -> None:
    (table,) = re.findall(r"\| format \|.*?\n\n", PAGE, re.DOTALL)
    rows = [row.split("|") for row in table.strip().splitlines()[2:]]
    methods = {name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row[2])}
    assert methods >= set(METHODS) - {"modelopt_fp4"}
    script = runpy.run_path(SCRIPT)
    assert sorted(_formats()) == sorted([*script["FORMATS"], *script["GGUF_TYPES"]])
