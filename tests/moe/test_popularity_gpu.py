"""Learned popularity on a GPU: nothing but speed changes, and learning keeps to its time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.plan.popularity import SHARE, LearningPace, RowErrors

pytestmark = pytest.mark.gpu
CONFIG = GPTConfig(
    vocab=256, n_layers=6, d_model=256, d_hidden=512, n_heads=4, n_experts=16, top_k=2, max_seq=256
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.models.predictor.cache_folder", lambda: tmp_path)


def train(kind: str, dtype: torch.dtype, steps: int, **options: Any) -> tuple[Any, list[Tensor]]:
    model: Any = GPTMoE(CONFIG, checkpoint=False, seed=1, device="cuda", dtype=dtype)
    overspill.offload(
        model, mode="host", slots=20, quiet=True, progress=False,
        settings=overspill.Settings(popularity=kind, residency=False, **options),
    )  # fmt: skip
    optimizer = overspill.AdamW(model, lr=1e-3, max_grad_norm=1.0)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(256, (8, 129), generator=generator).to("cuda")
        losses.append(model(tokens[:, :-1], tokens[:, 1:]).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return model, [loss.detach() for loss in losses]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_weights_are_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LearningPace, "allows", lambda *_: True)
    monkeypatch.setattr(RowErrors, "prefers_prediction", True)
    found = []
    for kind in ("history", "learned"):
        model, losses = train(kind, dtype, 4)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        found.append((losses, weights))
        observer = model.overspill.popularity.observer
        model.overspill.check_conserved()
        model.overspill.close()
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
    assert observer.stats()["token_accuracy_1"] > 0


def test_learning_keeps_to_its_share_of_the_time() -> None:
    model, _ = train("learned", torch.bfloat16, 120)
    pace = model.overspill.popularity.observer.pace
    model.overspill.close()
    assert model.overspill.popularity.observer.predictor.learned_tokens > 0
    assert pace.seconds > 0
    later = pace.seconds - SHARE * pace.busy  # beside the first one, which loads libraries
    assert later < 0.5
