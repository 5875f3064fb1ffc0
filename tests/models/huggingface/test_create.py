"""`overspill create`: checkpoints with random weights."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import overspill
from overspill.core.errors import ConfigError, DiskError
from overspill.models.huggingface.create import create
from tests.models.huggingface.oracle import budgets
from tests.slow import slow_rows

SWITCH: dict[str, Any] = {"layers": 2, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4}
NLLB: dict[str, Any] = {
    "layers": 4, "experts": 5, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip
GPT: dict[str, Any] = {
    "layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
}  # fmt: skip
TINY = [
    ("switch-base-8", SWITCH, "AutoModelForSeq2SeqLM"),
    ("nllb-moe-54b", NLLB, "AutoModelForSeq2SeqLM"),
    ("nano", {"layers": 2}, "AutoModelForCausalLM"),
    ("moe-s", GPT, "AutoModelForCausalLM"),
]


def _config(name: str, fields: dict[str, Any]) -> Any:
    return overspill.preset_config(name, vocab_size=300, **fields)


@pytest.mark.parametrize(("name", "fields", "auto"), slow_rows(TINY, 0, 2))
def test_a_created_checkpoint_is_the_model_of_its_seed(
    name: str, fields: dict[str, Any], auto: str, tmp_path: Path
) -> None:
    """transformers, `load` from a disk tier, and `from_config` have the same weights."""
    config = _config(name, fields)
    reports: list[tuple[int, int]] = []
    done = create(
        config, tmp_path / "out", torch.float32, seed=3, shard_bytes=50_000,
        progress=lambda what, at, total: reports.append((at, total)),
    )  # fmt: skip
    plain = getattr(transformers, auto).from_pretrained(tmp_path / "out")
    assert plain.num_parameters() == done.parameters
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert reports == sorted(reports)
    assert reports[-1] == (done.bytes, done.bytes)
    state = plain.state_dict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        fresh = overspill.from_config(config, train=False, **budgets("host", tmp_path))
    again = overspill.load(tmp_path / "out", train=False, **budgets("disk", tmp_path))
    with closing(fresh.overspill), closing(again.overspill):
        for model in (fresh, again):
            mine = model.state_dict()
            assert mine.keys() == state.keys()
            for key, value in state.items():
                assert torch.equal(mine[key] + 0, value), key


@pytest.mark.parametrize(("name", "fields", "auto"), TINY[:2])
def test_experts_are_drawn_as_transformers_draws_them(
    name: str, fields: dict[str, Any], auto: str, tmp_path: Path
) -> None:
    config = _config(name, fields)
    create(config, tmp_path / "out", torch.float32)
    drawn = getattr(transformers, auto).from_pretrained(tmp_path / "out").state_dict()
    for key, value in getattr(transformers, auto).from_config(config).state_dict().items():
        if value.dim() == 2 and value.numel() >= 1000:
            assert drawn[key].std() == pytest.approx(float(value.std()), rel=0.15), key
        elif value.dim() == 1:
            assert torch.equal(drawn[key], value), key


def test_a_full_disk_and_a_folder_that_exists_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(*TINY[0][:2])
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(ConfigError, match=r"OUT .*there already exists"):
        create(config, tmp_path / "there")
    with pytest.raises(ConfigError, match=r"--tokenizer .* has no tokenizer"):
        create(config, tmp_path / "out", tokenizer=tmp_path / "there")
    monkeypatch.setattr("overspill.tiers.aside.disk_free", lambda folder: 1000)
    with pytest.raises(DiskError, match=r"OUT .*has 1000 B free"):
        create(config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
