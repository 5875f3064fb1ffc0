"""The state dict of an offloaded model is that of the plain model, whatever is in flight."""

import threading
from pathlib import Path

import pytest
import torch

from overspill.core.experts import ExpertId
from overspill.models.gpt import GPTMoE
from overspill.moe.settings import Settings
from tests.moe.oracle import (
    WHERE,
    Run,
    Task,
    adamw,
    assert_same_bits,
    delays,
    loss_of,
    spilled,
    train_step,
    weights_of,
)
from tests.slow import slow_names


@pytest.mark.parametrize(
    "where",
    slow_names(
        WHERE,
        "host with 5 slots",
        "host with 12 slots",
        "host, 7 resident",
        "disk behind 9 host slots",
    ),
)
def test_the_state_dict_is_that_of_the_plain_model(where: str, tmp_path: Path) -> None:
    task = Task(n_layers=4, moe_every=2)
    plain, model = task.model(), task.model()
    with spilled(model, where, tmp_path):
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=weights_of(plain)))
        other = GPTMoE(task.config, seed=5)
        tokens = next(task.batches())[0]
        with torch.no_grad():
            loss_of(model, tokens)  # copies in GPU slots, which are out of date then
            model.load_state_dict(other.state_dict())
            assert loss_of(model, tokens).item() == pytest.approx(
                loss_of(other, tokens).item(), rel=1e-6
            )
        plain.load_state_dict(model.state_dict())
    assert_same_bits(Run(weights=weights_of(plain)), Run(weights=weights_of(other)))


@pytest.mark.parametrize("where", ["gpu", "host with 2 slots"])
def test_a_state_dict_that_does_not_fit_is_refused_as_by_a_plain_model(
    where: str, tmp_path: Path
) -> None:
    task = Task()
    model = task.model()
    with spilled(model, where, tmp_path):
        before = weights_of(model)
        given = weights_of(GPTMoE(task.config, seed=5))
        name = "blocks.1.moe.w_out"
        without = {key: value for key, value in given.items() if key != name}
        with pytest.raises(RuntimeError, match=rf"Missing key.*{name}"):
            model.load_state_dict(without)
        model.load_state_dict(without, strict=False)
        assert torch.equal(model.state_dict()[name], before[name])
        more = {**given, name: torch.cat([given[name], given[name]])}  # of twice the experts
        with pytest.raises(RuntimeError, match=rf"size mismatch for {name}"):
            model.load_state_dict(more)
        with pytest.raises(RuntimeError, match=r"Unexpected key.*another"):
            model.load_state_dict({**given, "another": torch.ones(1)})


def test_a_state_dict_that_is_read_during_transfers_is_that_of_the_step(tmp_path: Path) -> None:
    task = Task(steps=4)
    quiet, moving = [], []
    for snapshots, inject in ((quiet, None), (moving, delays(seed=2, longest=0.01))):
        model = task.model()
        with spilled(model, "disk behind 9 host slots", tmp_path, Settings(inject=inject)):
            optimizer = adamw(model, task)
            for batches in task.batches():
                train_step(model, optimizer, batches)
                snapshots.append(weights_of(model))
    for expected, got in zip(quiet, moving, strict=True):
        assert_same_bits(Run(weights=got), Run(weights=expected))


def test_flush_waits_for_uploads_too(tmp_path: Path) -> None:
    """The end of an upload may evict an expert from its host slot while records are read."""
    task = Task(clip=0.5)
    model = task.model()
    begun, go = threading.Event(), threading.Event()
    go.set()

    def hold(kind: str) -> None:
        if kind == "upload" and not go.is_set():
            begun.set()
            assert go.wait(60)

    with spilled(model, "disk behind 9 host slots", tmp_path, Settings(inject=hold)) as engine:
        optimizer = adamw(model, task)
        loss_of(model, next(task.batches())[0]).backward()
        go.clear()
        optimizer.step()  # experts are updated, then uploaded for the next forward
        assert begun.wait(60)
        flush = threading.Thread(target=engine.flush)
        flush.start()
        flush.join(0.1)
        assert flush.is_alive()
        go.set()
        flush.join(60)
        assert not flush.is_alive()


def test_a_model_on_the_meta_device_starts_with_the_same_weights(tmp_path: Path) -> None:
    task = Task()
    model = GPTMoE(task.config, seed=1, meta_experts=True)
    with spilled(model, "disk behind 3 host slots", tmp_path) as engine:
        assert_same_bits(Run(weights=weights_of(model)), Run(weights=weights_of(task.model())))
        record = torch.empty(engine.shape.numel)
        engine.records.read_weights(ExpertId(1, 2), record)
        assert record.std() > 0
