"""Models of Hugging Face train on two ranks as in one process: two steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import overspill
from overspill.core.experts import ExpertId
from overspill.moe.settings import Settings
from overspill.moe.state_dict import placeholders, split_record
from overspill.parallel.sharded import whole
from tests.models.huggingface.families import FAMILIES, make_batch, make_model
from tests.models.huggingface.oracle import ADAM
from tests.parallel.processes import run_ranks

STEPS, RANKS, CLIP = 2, 2, 0.5
# Mixtral's experts stay on their ranks in tests of nodes and of divided dense weights
RUNS = [("qwen3_moe", "static"), ("mixtral", "dynamic"), ("gpt_oss", "dynamic")]
SLOW = [("deepseek_v3", "static"), ("gpt_oss", "static")]
REENTRANT = {"mixtral": True, "gpt_oss": False}  # families that recompute their blocks
TOKENS = torch.arange(3, 27).view(2, 12)
BY_NAME = {family.name: family for family in FAMILIES}

Weights = dict[str, Tensor]


def new_model(name: str) -> Any:
    model: Any = make_model(BY_NAME[name])
    if name in REENTRANT:
        model.gradient_checkpointing_enable({"use_reentrant": REENTRANT[name]})
    return model


def batch(name: str, model: Any, step: int, rank: int) -> dict[str, Tensor]:
    return make_batch(BY_NAME[name], model, seed=10 * step + rank)


def plain(name: str, n_ranks: int = RANKS) -> tuple[list[float], Weights]:
    model, losses = new_model(name), []
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(STEPS):
        losses_of_ranks = [model(**batch(name, model, step, r)).loss for r in range(n_ranks)]
        parts = [loss / n_ranks for loss in losses_of_ranks]
        torch.stack(parts).sum().backward()
        losses.append(sum(part.item() for part in parts))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.detach() for key, value in model.named_parameters()}


def train_rank(
    mesh: DeviceMesh, name: str, placement: str = "static", **more: Any
) -> tuple[list[float], Weights, Weights]:
    """The losses, the dense weights, and those of this rank's experts by path and index."""
    rank, model, losses = dist.get_rank(), new_model(name), []
    settings = Settings(threads=1, placement=placement)
    where: dict[str, Any] = {"mode": "host", "slots": 2, "mesh": mesh, **more}
    overspill.offload(model, quiet=True, settings=settings, **where)
    optimizer = overspill.AdamW(model, max_grad_norm=CLIP, **ADAM)
    for step in range(STEPS):
        loss = model(**batch(name, model, step, rank)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    engine = model.overspill
    engine.flush()
    assert (engine.balance.placed < engine.balance.static) is (placement == "dynamic")
    dense = {key: whole(p.detach()) for key, p in model.named_parameters() if p.numel()}
    experts = {}
    for path, placeholder, places in placeholders(model):
        for index in engine.experts.local_ids:
            record = torch.empty(engine.shape.numel)
            engine.records.read_weights(ExpertId(placeholder.layer, index), record)
            parts = split_record(record, engine.shape)
            for place, part in zip(places(index), parts, strict=True):
                experts[f"{path}.{place.name} {place.expert}"] = part
    engine.close()
    return losses, dense, experts


def train_all(
    mesh: DeviceMesh, runs: list[tuple[str, str]]
) -> list[tuple[list[float], Weights, Weights]]:
    return [train_rank(mesh, *run) for run in runs]


def assert_follow_plain(
    wanted: tuple[list[float], Weights], results: list[tuple[list[float], Weights, Weights]]
) -> None:
    losses, weights = wanted
    of_steps = zip(*(result[0] for result in results), strict=True)
    means = [sum(of_ranks) / len(results) for of_ranks in of_steps]
    torch.testing.assert_close(means, losses, rtol=1e-5, atol=1e-6)
    for _, dense, experts in results:
        for key, value in dense.items():
            assert torch.equal(value, results[0][1][key]), key
            torch.testing.assert_close(value, weights[key], rtol=1e-5, atol=1e-5)
        for key, value in experts.items():
            path, index = key.rsplit(" ", 1)
            torch.testing.assert_close(value, weights[path][int(index)], rtol=1e-5, atol=1e-5)
        assert {key.rsplit(" ", 1)[0] for key in experts} | dense.keys() == {*weights}


@pytest.mark.parametrize(
    "runs", [RUNS, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_two_ranks_follow_eager_transformers(runs: list[tuple[str, str]]) -> None:
    for (name, _), *results in zip(runs, *run_ranks(RANKS, train_all, runs), strict=True):
        assert_follow_plain(plain(name), results)


def make_and_save(mesh: DeviceMesh | None, out: Path, **more: Any) -> None:
    torch.manual_seed(1)
    config = BY_NAME["mixtral"].build()
    where: dict[str, Any] = {"mode": "host", "slots": 2, "device": "cpu", "mesh": mesh, **more}
    model = overspill.from_config(config, quiet=True, progress=False, **where)
    overspill.save(model, out, max_shard_size="20KB")
    model.overspill.close()


@pytest.mark.slow
def test_from_config_and_save_give_the_same_files_on_any_number_of_ranks(tmp_path: Path) -> None:
    make_and_save(None, tmp_path / "one")
    files = {file.name: file.read_bytes() for file in (tmp_path / "one").iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 2
    out = tmp_path / "three"  # two ranks and two nodes are in other files
    assert run_ranks(3, make_and_save, out) == [None] * 3
    assert {file.name: file.read_bytes() for file in out.iterdir()} == files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three"]


def load_rank(mesh: DeviceMesh, folder: Path) -> tuple[Tensor, tuple[int, ...]]:
    """Logits of a model of which this rank has read its experts alone."""
    model = overspill.load(folder, mode="host", slots=2, mesh=mesh, quiet=True, progress=False)
    return model(input_ids=TOKENS).logits.detach(), model.overspill.experts.local_ids


def test_each_rank_loads_its_own_experts(tmp_path: Path) -> None:
    model = make_model(BY_NAME["mixtral"])
    model.save_pretrained(tmp_path)
    want = model(input_ids=TOKENS).logits
    for (logits, ids), own in zip(run_ranks(2, load_rank, tmp_path), [(0, 1), (2, 3)], strict=True):
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)
        assert ids == own
