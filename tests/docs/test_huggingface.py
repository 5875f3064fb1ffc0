"""docs/huggingface.md: its code runs and does what the text says."""

import inspect
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "huggingface.md"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The variables of the page's Python code, run from top to bottom."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("page")
    before = Path.cwd()
    os.chdir(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["make_tiny_checkpoint.py", "tiny"])
            script = ROOT / "examples" / "make_tiny_checkpoint.py"
            runpy.run_path(str(script), run_name="__main__")
        names: dict[str, Any] = {"folder": folder}
        exec(compile(_python(PAGE.read_text()), str(PAGE), "exec"), names)
        yield names
    finally:
        os.chdir(before)
    for name in ("model", "plain", "fresh", "base"):
        names[name].overspill.close()


def _python(text: str) -> str:
    """The Python code of the page, with its line numbers, so that errors name them."""
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            inside, line = line == "```python", ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def test_the_loop_learns(ran: Any) -> None:
    assert ran["losses"][-1] < ran["losses"][0]
    assert ran["opt"].steps_taken == 3


def test_the_trainer_takes_steps_and_writes_a_checkpoint(ran: Any) -> None:
    assert ran["trainer"].state.global_step == 2
    saved = ran["folder"] / "runs" / "trainer" / "checkpoint-2"
    assert (saved / "overspill_optimizer.safetensors").is_file()
    assert (saved / "optimizer.pt").is_file()


def test_adapters_are_saved_alone(ran: Any) -> None:
    assert any(parameter.grad.any() for parameter in ran["adapters"])
    files = {file.name for file in (ran["folder"] / "adapter").glob("*.safetensors")}
    assert files == {"adapter_model.safetensors"}
    assert (ran["folder"] / "merged" / "model.safetensors").is_file()


def test_the_saved_model_is_the_trained_model(ran: Any) -> None:
    again, model = ran["again"], ran["model"]
    assert type(again) is type(model)
    theirs, mine = again.state_dict(), model.state_dict()
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(theirs[name], mine[name]) for name in theirs)


def test_the_model_behaves_as_the_table_says(ran: Any) -> None:
    plain = ran["again"]
    assert ran["total"] == plain.num_parameters()
    assert ran["experts"].shape == (8, 128, 32)
    experts = sum(p.numel() for name, p in plain.named_parameters() if ".experts." in name)
    assert ran["dense"] == ran["total"] - experts
    placeholders = [
        n for n, _ in ran["model"].named_parameters() if n.endswith("experts.overspill")
    ]
    assert len(placeholders) == plain.config.num_hidden_layers
    assert ran["shown"].startswith("Experts")
    assert ran["model"].dtype == torch.float32  # the error came before anything had moved


def test_a_model_from_a_config_has_its_dtype_and_experts(ran: Any) -> None:
    assert ran["fresh"].dtype == ran["fresh"].overspill.dtype == torch.bfloat16
    assert ran["fresh"].overspill.n_experts == 16


def test_it_names_every_argument_of_load() -> None:
    own, more = (inspect.signature(each).parameters for each in (overspill.load, overspill.offload))
    known = {*own, *more} - {"path_or_repo", "model", "more"}
    (table,) = re.findall(r"\| argument \|.*?\n\n", PAGE.read_text(), re.DOTALL)
    first = " ".join(line.split("|")[1] for line in table.strip().splitlines())
    assert set(re.findall(r"`(\w+)`", first)) == known
