import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from overspill.cli.main import app
from tests.train.fakes import tiny_settings


def _train(folder: Path, *more: str) -> Path:
    flags = [
        word
        for name, value in tiny_settings(folder, steps=1).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert app(["train", *flags, *more]) == 0
    return folder / "run"


def test_train_then_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _train(tmp_path)
    capsys.readouterr()
    assert app(["export", str(run), str(tmp_path / "out")]) == 0
    assert f"from_pretrained('{tmp_path / 'out'}')" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_local_experts == 4
    assert app(["export", str(run), str(tmp_path / "two"), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["out"], done["step"]) == (str(tmp_path / "two"), 1)


def test_a_run_and_a_checkpoint_are_quantized_and_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _train(tmp_path, "--gated", "--top-k", "2", "--d-model", "32", "--d-hidden", "64")
    folders = [str(tmp_path / name) for name in ("plain", "of-run", "of-plain")]
    assert app(["export", str(run), folders[0]]) == 0
    for source, out in ((str(run), folders[1]), (folders[0], folders[2])):
        capsys.readouterr()
        assert app(["export", source, out, "--quantize", "int4"]) == 0
        told = capsys.readouterr().out
        assert "experts in int4) to" in told
        assert f"overspill generate {out} PROMPT" in told
    names = {path.name for path in Path(folders[0]).iterdir()}
    for name in names:
        one, other = (Path(folder, name).read_bytes() for folder in folders[1:])
        assert one == other or name == "config.json"
    texts = []
    flags = ["--max-tokens", "8", "--temperature", "0", "--slots", "3", "--device", "cpu", "--json"]
    for model, more in (
        (folders[0], ["--quantize", "int4"]), (folders[1], ["--no-packed"]), (folders[2], []),
        (str(run), ["--quantize", "int4"]),
    ):  # fmt: skip
        capsys.readouterr()
        assert app(["generate", model, "def ", *flags, *more]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert all(text == texts[0] for text in texts)


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["export", "--help"]) == 0
    assert "overspill export runs/nano exported" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _train(tmp_path)
    for arguments, message in [
        ([str(tmp_path / "none"), str(tmp_path / "out")], "is not the folder of a run"),
        ([str(run), str(run)], "already exists"),
        ([str(run)], "OUT"),
        (
            [str(run), str(tmp_path / "out"), "--quantize", "int3"],
            "--quantize int3 is unknown; give mxfp4 or int4 or fp8",
        ),
    ]:
        capsys.readouterr()
        assert app(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_with_gelu_experts_is_exported_fine_tuned_pre_gated_and_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the models of the papers: GELU, one expert per token, dense blocks between."""
    run = _train(tmp_path, "--no-gated", "--top-k", "1", "--moe-every", "2", "--layers", "4")
    out, data = str(tmp_path / "out"), tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "ab", "completion": " cd"}\n' * 8)
    assert app(["export", str(run), out]) == 0
    assert "after import overspill" in capsys.readouterr().out
    small = ["--steps", "2", "--batch", "2", "--slots", "3", "--eval-every", "0", "--device", "cpu"]
    tuned = [str(tmp_path / "tuned"), str(tmp_path / "gated")]
    assert app(["finetune", out, str(data), *small, "--balance", "--out", tuned[0]]) == 0
    assert app(["pregate", out, str(data), *small, "--level", "1", "--out", tuned[1]]) == 0
    assert (tmp_path / "gated" / "final" / "pregates.safetensors").is_file()
    texts = []
    for model in (str(run), out, *tuned):
        capsys.readouterr()
        flags = [
            "--max-tokens",
            "8",
            "--temperature",
            "0",
            "--slots",
            "3",
            "--device",
            "cpu",
            "--json",
        ]
        assert app(["generate", model, "def ", *flags]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1]
    assert all(texts)
    model = AutoModelForCausalLM.from_pretrained(out)
    ids = AutoTokenizer.from_pretrained(out)("def ", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    assert made[: len(texts[0])] == texts[0]
