"""`overspill finetune --stages`: the same losses, with micro-batches in stages."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from overspill.core.errors import ConfigError
from overspill.train.finetune.config import FinetuneConfig, PregateConfig
from overspill.train.finetune.finetuner import finetune
from overspill.train.metrics import read_lines
from tests.train.fakes import Watcher
from tests.train.finetune.tiny import tiny_settings, write_jsonl, write_pairs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Examples of different lengths, which do not fill the last batch of an epoch."""
    lines = [{"prompt": f"{n}:", "completion": "ab" * (1 + n % 5)} for n in range(31)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "pairs.jsonl", lines)


def run(settings: dict[str, Any], display: Watcher | None = None) -> Watcher:
    display = display or Watcher()
    finetune(FinetuneConfig.make(settings), display)
    return display


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({"batch": 2, "accumulate": 3, "slots": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"batch": 2, "accumulate": 2, "balance": True, "clip": 0.0}, marks=pytest.mark.slow
        ),
        {
            "batch": 3,
            "accumulate": 2,
            "lora": 2,
            "lora_experts": True,
            "gradient_checkpointing": False,
        },
    ],
    ids=["clipped", "balance", "lora"],
)
def test_losses_equal_those_without_stages(
    mixtral: Path, pairs: Path, tmp_path: Path, extra: dict[str, Any]
) -> None:
    settings = {"steps": 2, "eval_every": 2, **extra}
    plain = run(tiny_settings(mixtral, pairs, tmp_path / "a", **settings))
    staged = run(tiny_settings(mixtral, pairs, tmp_path / "b", stages=2, **settings))
    assert staged.losses == pytest.approx(plain.losses, rel=1e-6)
    assert staged.evals == pytest.approx(plain.evals, rel=1e-6)
    kinds = [
        [(line["loss"], line["ce"], line["balance"]) for line in lines if "ce" in line]
        for lines in (read_lines(tmp_path / name / "metrics.jsonl") for name in "ab")
    ]
    for one, other in zip(*kinds, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert bool(extra.get("balance")) == any(balance > 0 for _, _, balance in kinds[1])


def test_a_run_in_stages_resumes_to_the_same_bits(
    mixtral: Path, pairs: Path, tmp_path: Path
) -> None:
    given = {"steps": 3, "stages": 2, "batch": 2, "accumulate": 2}
    straight = run(tiny_settings(mixtral, pairs, tmp_path / "a", **given))
    settings = tiny_settings(mixtral, pairs, tmp_path / "b", **given)
    stop = Watcher(lambda done: os.kill(os.getpid(), signal.SIGINT) if done == 2 else None)
    first = run(settings, stop)
    assert len(first.losses) == 2
    # stages are a matter of speed: a run may go on without them
    rest = run({**settings, "resume": True, "stages": 1})
    assert first.losses + rest.losses == straight.losses
    one, two = weights(tmp_path / "a" / "final"), weights(tmp_path / "b" / "final")
    assert one.keys() == two.keys() != set()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_more_stages_than_blocks_are_refused(mixtral: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, tmp_path / "run", stages=3)
    with pytest.raises(ConfigError, match=r"^--stages 3: .*mixtral has 2 blocks; give 1 to 2"):
        run(settings)
    assert not (tmp_path / "run").exists(), "before anything is loaded or written"


def test_pre_gates_are_trained_in_stages(mixtral: Path, pairs: Path, tmp_path: Path) -> None:
    """`overspill pregate`, then `finetune` of what it has saved; the bits are those without."""
    given = {"steps": 2, "batch": 2, "accumulate": 2, "eval_every": 2, "lr": 1e-3}
    for name, stages in (("a", 1), ("b", 2)):
        settings = tiny_settings(mixtral, pairs, tmp_path / name, stages=stages, **given)
        finetune(PregateConfig.make(settings), Watcher())
        again = {"stages": stages, **given}
        run(tiny_settings(tmp_path / name / "final", pairs, tmp_path / (name * 2), **again))
    for one, two in (("a", "b"), ("aa", "bb")):
        metrics = [list(read_lines(tmp_path / name / "metrics.jsonl")) for name in (one, two)]
        losses = [[e["loss"] for e in lines if "loss" in e] for lines in metrics]
        evals = [[e["eval_loss"] for e in lines if "eval_loss" in e] for lines in metrics]
        assert losses[0] == losses[1] != []
        assert evals[0] == evals[1] != []
        files = [weights(tmp_path / name / "final") for name in (one, two)]
        assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_encoder_decoders_are_refused(switch: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"stages.*an encoder and a decoder.*without"):
        run(tiny_settings(switch, data, tmp_path / "run", stages=2))
