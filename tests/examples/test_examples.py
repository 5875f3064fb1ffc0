"""The examples run as their first lines say."""

import importlib.util
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *args: object) -> None:
    path = str(ROOT / "examples" / script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *map(str, args)])
        runpy.run_path(path, run_name="__main__")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("examples") / "tiny"
    run("make_tiny_checkpoint.py", out)
    return out


@pytest.fixture(autouse=True)
def _reset_accelerate() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_the_checkpoint_has_a_tokenizer_for_any_text_and_for_chats(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "Ünï¢ode, tabs\tand 漢字\n  too"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False)
    assert shown == "user: Hi</s>\nassistant: Ho</s>\n"
    asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert shown.startswith(asked)


def test_formats_of_gguf_name_the_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run("make_tiny_checkpoint.py", tmp_path / "tiny", "--format", "gguf-q4_k")
    assert "pip install gguf" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


def test_the_plain_loop_learns_and_leaves_a_checkpoint(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    args = ("--device", "cpu", "--steps", 6, "--lr", 0.01, "--out", tmp_path / "tuned")
    run("plain_loop.py", checkpoint, *args)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (checkpoint, tmp_path / "tuned")
    )
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "experts" in name)


def test_the_trainer_goes_on_where_it_stopped(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "run"
    args = (checkpoint, "--device", "cpu", "--steps", 4, "--save-every", 2, "--out", out)
    run("trainer.py", *args)
    whole = AutoModelForCausalLM.from_pretrained(out).state_dict()
    run("trainer.py", *args, "--resume", out / "checkpoint-2")
    for name, value in AutoModelForCausalLM.from_pretrained(out).state_dict().items():
        assert torch.equal(value, whole[name]), name
