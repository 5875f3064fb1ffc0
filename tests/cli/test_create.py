import json
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from overspill.cli.main import app

_FIELDS = ("d_model=32", "d_kv=8", "d_ff=48", "num_heads=4")
TINY = ["--layers", "2", "--experts", "3", *(word for f in _FIELDS for word in ("--set", f))]


def test_create_writes_a_checkpoint_with_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    words = ["create", "switch-base-8", out, *TINY, "--tokenizer", "bytes"]
    assert app([*words, "--json", "--seed", "5"]) == 0
    done = json.loads(capsys.readouterr().out)
    model = AutoModelForSeq2SeqLM.from_pretrained(out)
    assert model.num_parameters() == done["parameters"]
    assert model.config.vocab_size == 264  # the one of the tokenizer
    assert app([*words[:2], f"{out}3", *words[3:], "--set", "vocab_size=300"]) == 0
    assert json.loads(Path(f"{out}3", "config.json").read_text())["vocab_size"] == 300
    capsys.readouterr()
    assert (done["moe_blocks"], done["experts"], model.config.num_experts) == (2, 3, 3)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("Grüße", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert made[0, 0] == model.config.decoder_start_token_id == tokenizer.eos_token_id == 256
    # the tokenizer of one folder in another
    assert app(["create", "switch-base-8", f"{out}2", *TINY, "--tokenizer", out]) == 0
    assert "3 experts" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(f"{out}2").encode("a") == tokenizer.encode("a")


def test_the_list_has_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["create", "--list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["switch-large-128"]["bytes"] == pytest.approx(52.6e9, rel=0.01)
    assert app(["create", "--list"]) == 0
    assert "24 × 128" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("switch-base-9 OUT", "did you mean switch-base-8"),
        ("switch-base-8", "needs NAME and OUT; overspill create --list"),
        ("switch-base-8 OUT --set d_model", "--set d_model is not FIELD=VALUE"),
        ("switch-base-8 OUT --set d_mode=3", "did you mean d_model"),
        ("switch-base-8 OUT --set num_heads=0", "num_heads=0 must be at least 1"),
        ("switch-base-8 OUT --set hidden_size=0", "hidden_size=0 must be at least 1"),
        ("nllb-moe-54b OUT --set decoder_attention_heads=-1", "=-1 must be at least 1"),
        ("nano OUT --set num_attention_heads=0", "num_attention_heads=0 must be at least 1"),
        ("switch-base-8 OUT --layers 1", "at least 2"),
        ("switch-base-8 OUT --dtype fp8", "--dtype fp8 is unknown; give bf16 or fp32"),
        ("switch-base-8 OUT --set vocab_size=100 --tokenizer bytes", "--set vocab_size=257"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app(["create", *words.replace("OUT", str(tmp_path / "out")).split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
