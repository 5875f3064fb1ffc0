"""Uses of a GGUF file that contains everything."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import overspill
from overspill.cli.main import app
from overspill.core.errors import ConfigError
from overspill.models.huggingface.folder import CheckpointFolder
from overspill.models.huggingface.tokenizer import open_tokenizer
from tests.models.huggingface.gguf.cases import CASES, load, make_case
from tests.slow import slow_rows

SCRIPT = str(Path(__file__).parents[4] / "examples" / "make_tiny_checkpoint.py")


ERRORS = {
    "gguf-mixed": 0.1, "gguf-q4_k": 0.1, "gguf-mxfp4": 0.25, "gguf-q4_0": 0.2, "gguf-q8_0": 0.01,
}  # fmt: skip


def made(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", [SCRIPT, str(folder), "--format", kind])
    runpy.run_path(SCRIPT, run_name="__main__")
    return folder / "model.gguf"


@pytest.mark.parametrize(
    ("kind", "error"),
    slow_rows([*ERRORS.items()], 1, 2, 3, 4),
)
def test_the_example_quantizes_weights(
    kind: str, error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to their size, and only with the values that the type has."""
    script = runpy.run_path(SCRIPT)
    path = made(tmp_path / "tiny", kind, monkeypatch)
    torch.manual_seed(0)
    make = script["make_gpt_oss" if "mxfp4" in kind else "make_model"]
    plain = make(259, 8, 256 if kind in ("gguf-q4_k", "gguf-mixed") else 32).state_dict()
    model = overspill.load(path, device="cpu", train=False, quiet=True, dtype=torch.float32)
    state = model.state_dict()
    for name, weight in plain.items():
        found = state[name] + 0
        assert (found - weight).norm() <= error * weight.norm(), name
    model.overspill.close()


def test_texts_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = made(tmp_path / "tiny", "gguf-mixed", monkeypatch)
    given = ["Experts", "--max-tokens", "6", "--temperature", "0", "--device", "cpu"]
    capsys.readouterr()
    answers = []
    for model, more in ((path, ["--no-packed"]), (path.parent, [])):
        assert app(["generate", str(model), *given, *more]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    messages = [{"role": "user", "content": "Hello"}]
    text = open_tokenizer(path).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert text == "user: Hello</s>\nassistant: "
    assert app(["generate", str(tmp_path / "none.gguf"), *given]) == 2
    assert "does not exist; give the folder of a checkpoint, a GGUF" in capsys.readouterr().err


@pytest.mark.slow  # test_load.py has the parts
def test_an_adapter_is_trained_served_and_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("peft")
    path = made(tmp_path / "tiny", "gguf-q8_0", monkeypatch)
    run, merged, device = str(tmp_path / "run"), str(tmp_path / "merged"), ["--device", "cpu"]
    chats = str(path.parent / "chats.jsonl")
    flags = ["--lora", "2", "--lora-experts", "--steps", "2", "--out", run, *device]
    assert app(["finetune", str(path), chats, *flags]) == 0
    config = json.loads((tmp_path / "run/final/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(path)
    assert app(["generate", run, "Experts", "--max-tokens", "3", *device]) == 0
    assert app(["merge", run, merged]) == 0
    tokenizer = AutoTokenizer.from_pretrained(merged)
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("Zwölf?")["input_ids"]) == "Zwölf?"


def test_a_plain_file_is_quantized(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def choose(name: str, shape: tuple[int, ...]) -> str:
        return "F32" if len(shape) == 1 or "inp" in name else "BF16"

    _, eager = make_case(CASES["olmoe"], path, choose)
    model = load(path, quantize="int4")
    assert model.overspill.layout.format.is_packed
    model.overspill.close()
    eager.save_pretrained(tmp_path / "plain")
    with CheckpointFolder(path) as gguf, CheckpointFolder(tmp_path / "plain") as plain:
        for name in plain.specs:
            if name in gguf.specs:
                assert torch.equal(gguf.read_whole(name).float(), plain.read_whole(name))
    make_case(CASES["mixtral"], path)
    with pytest.raises(
        ConfigError, match=r"is quantized already \(.*: type \w+\); use it as it is"
    ):
        load(path, quantize="int4")
