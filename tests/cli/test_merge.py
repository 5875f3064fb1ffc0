"""From `overspill finetune --lora` to a merged checkpoint and to answers."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.cli.main import app
from tests.serve.models import plain_generate
from tests.train.finetune.tiny import save_mixtral, tiny_settings, write_pairs
from tests.train.pictures import DRAWINGS

GREEDY = ["--max-tokens", "6", "--temperature", "0", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was given the checkpoint by a relative path."""
    folder = tmp_path_factory.mktemp("lora")
    pytest.importorskip("peft")
    save_mixtral(folder / "base")
    settings = tiny_settings(Path("base"), write_pairs(folder / "a.jsonl"), Path("run"))
    settings |= {"lora": 4, "lr": 0.3, "steps": 4}
    words = ["finetune", settings.pop("checkpoint"), *settings.pop("data")]
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for draw in DRAWINGS:
            patch.setattr("overspill." + draw, lambda *args: None)
        assert app(words) == 0
    return folder / "run"


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> list[int]:
    capsys.readouterr()
    assert app(["generate", *words, "5 + 1 = ", *GREEDY, "--json"]) == 0
    tokens: list[int] = json.loads(capsys.readouterr().out)["token_ids"]
    return tokens


def peft_answer(run: Path) -> list[int]:
    import transformers
    from peft import PeftModel

    base = transformers.AutoModelForCausalLM.from_pretrained(run.parent / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(base, run / "final")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "final")
    with torch.no_grad():
        return plain_generate(model, tokenizer.encode("5 + 1 = "), 6)


def test_a_run_its_adapter_and_the_merged_checkpoint_answer_as_peft(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = peft_answer(run)
    base, out = str(run.parent / "base"), str(tmp_path / "out")
    assert answer(capsys, base) != expected
    assert answer(capsys, str(run)) == expected
    assert answer(capsys, base, "--adapter", str(run / "best")) == expected
    assert app(["merge", str(run), out, "--json"]) == 0
    done: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (done["tensors"], done["base"]) == (8, base)
    assert answer(capsys, out) == expected


def test_the_summary_says_how_to_use_the_adapter(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    assert app(["finetune", "--resume", "--out", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "final adapter: run/final" in lines
    assert lines[-2] == "to try it: overspill chat run"
    assert lines[-1] == "as a plain checkpoint: overspill merge run run/merged"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["merge", "RUN"], "OUT"),
        (["merge", "/nowhere", "OUT"], "/nowhere does not exist"),
        (["merge", "BASE", "OUT"], "has no adapter_config.json: it is not a LoRA adapter"),
        (["merge", "RUN", "BASE"], "already exists; give the name of a new folder"),
        (["merge", "RUN", "OUT", "--base", "/nowhere"], "/nowhere does not exist"),
        (["merge", "RUN", "OUT", "--base", "RUN"], "cannot be used"),
        (["generate", "RUN", "a", "--adapter", "RUN"], "are both LoRA adapters"),
        (["export", "RUN", "OUT"], "overspill merge RUN OUT makes a checkpoint"),
        (["finetune", "RUN", "a.jsonl"], "overspill merge RUN OUT makes a checkpoint"),
        (["finetune", "RUN/final", "a.jsonl"], "holds a LoRA adapter, not a whole model"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str],
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, target in (("RUN", run), ("BASE", run.parent / "base")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    capsys.readouterr()
    assert app(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "OUT").exists()
