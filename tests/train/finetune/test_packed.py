"""Adapters of packed experts' models: trained, and served on the same experts."""

import json
from pathlib import Path

import pytest
import torch

from overspill.cli.main import app
from overspill.core.errors import ConfigError
from overspill.train.finetune.config import FinetuneConfig
from tests.models.huggingface.packed.cases import MAKE
from tests.train.finetune.tiny import tiny_settings, write_pairs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss in MXFP4, with a tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("packed"), MAKE["byte_tokenizer"]()
    torch.manual_seed(0)
    MAKE["make_gpt_oss"](len(tokenizer), 4).save_pretrained(folder)
    MAKE["pack"](folder, "mxfp4")
    tokenizer.save_pretrained(folder)
    return folder


def _finetune(checkpoint: Path, folder: Path, *more: str) -> tuple[Path, list[float]]:
    """The run, and the losses of its steps."""
    data, out = write_pairs(folder / "pairs.jsonl"), folder / "run"
    flags = ["--lora=4", "--steps=2", "--batch=2", "--dtype=fp32", "--lr=0.05"]
    assert app(["finetune", str(checkpoint), str(data), "--out", str(out), *flags, *more]) == 0
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return out, [line["loss"] for line in lines if "loss" in line]


def _answer(run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[int]:
    flags = ["--max-tokens=6", "--temperature=0", "--dtype=fp32", "--json"]
    capsys.readouterr()
    assert app(["generate", str(run), "Experts", *flags, *more]) == 0
    ids: list[int] = json.loads(capsys.readouterr().out)["token_ids"]
    return ids


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_adapter_learns_on_packed_experts_as_on_plain_ones(
    device: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = f"--device={device}"
    for name in ("plain", "packed"):
        (tmp_path / name).mkdir()
    run, losses = _finetune(checkpoint, tmp_path / "plain", on, "--no-packed")
    assert f"to try it: overspill chat {run} --no-packed" in capsys.readouterr().out
    assert losses[1] != losses[0]
    packed, same = _finetune(checkpoint, tmp_path / "packed", on)
    assert f"to try it: overspill chat {packed}\n" in capsys.readouterr().out
    assert same == pytest.approx(losses, rel=1e-4)
    assert _answer(packed, capsys, on) == _answer(run, capsys, on, "--no-packed")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"packed": True}, r"--packed: packed experts cannot be trained; add --lora RANK or --fr"),
        ({"quantize": "int4"}, r"--quantize int4: packed experts cannot be trained; add --lora"),
        ({"packed": True, "lora": 4, "gpus": 2}, r"--packed: several ranks .* drop --gpus 2$"),
        ({"packed": True, "quantize": "fp8", "lora": 4}, r"--quantize for others; drop one"),
    ],
)
def test_what_cannot_be_packed_is_refused(more: dict[str, object], message: str) -> None:
    settings = tiny_settings(Path("model"), Path("data"), Path("run")) | more
    with pytest.raises(ConfigError, match=message):
        FinetuneConfig.make(settings)
