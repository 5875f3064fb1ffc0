"""A model that trains in stages against plain transformers with torch's AdamW."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill
from overspill.transfer.streams import Defer
from tests.fuzz.late import LateStream
from tests.models.huggingface.families import EXPERT, VOCAB, Family, make_model, tiny
from tests.models.huggingface.oracle import ADAM, expert_gradients, offloaded

BLOCKS = 4
MIXTRAL = Family(
    "mixtral", partial(tiny, "mixtral", intermediate_size=EXPERT, num_hidden_layers=BLOCKS)
)

Batch = dict[str, Any]


def micro_batches(count: int, **others: Any) -> list[Batch]:
    """So many micro-batches of different sizes, some labels left out."""
    random = torch.Generator().manual_seed(count)
    found = []
    for number in range(count):
        shape = 1 + number % 2, 5 + 3 * number
        ids = torch.randint(3, VOCAB, shape, generator=random)
        labels = ids.clone()
        labels[0, : 1 + number] = -100
        found.append({"input_ids": ids, "labels": labels, **others})
    return found


def freeze(model: Any, what: str) -> None:
    """Freezes the "experts", the "dense" parameters, or "nothing"."""
    for name, parameter in model.named_parameters():
        is_expert = ".experts." in name
        parameter.requires_grad_(what == "nothing" or is_expert == (what == "dense"))


@dataclass
class Trained:
    """Results of some steps."""

    losses: list[list[float]] = field(default_factory=list)
    """Losses of each micro-batch, by step."""
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """Gradients of the first step; gradients of experts are clipped."""


def train_plain(model: Any, steps: Sequence[Sequence[Batch]], clip: float | None = None) -> Trained:
    """The oracle: transformers, and micro-batches that pass the whole model one after another."""
    trained, result = [p for p in model.parameters() if p.requires_grad], Trained()
    optimizer = torch.optim.AdamW(trained, **ADAM)
    for batches in steps:
        result.losses.append([])
        for batch in batches:
            loss = model(**batch).loss
            result.losses[-1].append(loss.item())
            (loss / len(batches)).backward()
        for name, parameter in model.named_parameters():
            # an expert without tokens decays too
            if parameter.requires_grad and parameter.grad is None and ".experts." in name:
                parameter.grad = torch.zeros_like(parameter)
        dense = _gradients(model, experts=False)
        if clip is not None:
            result.norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip)))
        result.gradients = result.gradients or dense | _gradients(model, experts=True)
        optimizer.step()
        optimizer.zero_grad()
    return result


def train_staged(
    stages: overspill.Stages,
    model: Any,
    optimizer: overspill.AdamW,
    steps: Sequence[Sequence[Batch]],
) -> Trained:
    """The same in stages."""
    result = Trained()
    for batches in steps:
        result.losses.append([])

        def loss_of(number: int, output: Any, count: int = len(batches)) -> Tensor:
            assert number == len(result.losses[-1]), "losses come in order, each once"
            result.losses[-1].append(output.loss.item())
            loss: Tensor = output.loss / count
            return loss

        stages.backward(batches, optimizer, loss_of)
        dense = _gradients(model, experts=False)
        optimizer.step()
        if optimizer.total_norm is not None:
            result.norms.append(optimizer.total_norm)
        if not result.gradients:
            result.gradients = dense | _expert_gradients(model, optimizer)
        optimizer.zero_grad()
    return result


def _gradients(model: Any, experts: bool) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if _is_expert(name) == experts
    }


def _is_expert(name: str) -> bool:
    return ".experts." in name and "lora_" not in name


def _expert_gradients(model: Any, optimizer: overspill.AdamW) -> dict[str, Tensor | None]:
    if any(p.requires_grad for name, p in model.named_parameters() if _is_expert(name)):
        return {**expert_gradients(model, optimizer)}
    return dict.fromkeys(name for name in model.state_dict() if ".experts." in name)


def assert_follows(run: Trained, plain: Trained) -> None:
    assert [pytest.approx(step, rel=1e-5) for step in plain.losses] == run.losses
    assert run.norms == pytest.approx(plain.norms, rel=1e-5)
    assert run.gradients.keys() == plain.gradients.keys()
    for name, theirs in plain.gradients.items():
        mine = run.gradients[name]
        if theirs is None or mine is None:
            assert mine is theirs, name
            continue
        atol = 1e-5 * float(theirs.abs().max()) + 1e-7
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=atol, msg=name)


class Late:
    """For `Settings.inject`: copies of every stream end late, and threads begin late."""

    def __init__(self) -> None:
        kinds = ("upload", "download", "host copies")
        self._streams = {kind: LateStream(kind, 3, longest=2e-4) for kind in kinds}
        self.seen: set[str] = set()

    def __call__(self, kind: str) -> Defer | None:
        self.seen.add(kind)
        stream = self._streams.get(kind)
        return None if stream is None else stream.defer

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


@contextmanager
def staged(
    n_stages: int, mode: str, folder: Path, *, model: Any = None, **given: Any
) -> Iterator[tuple[Any, overspill.Stages]]:
    """An offloaded copy of `model` (by default a Mixtral) in stages; all activations
    wait in host memory unless `offload_activations` says otherwise."""
    settings = given.pop("settings", None)
    given = {"offload_activations": True, "small_activation": 0, **given}
    with offloaded(make_model(MIXTRAL) if model is None else model, mode, folder, settings) as twin:
        stages = overspill.Stages(twin, n_stages, **given)
        yield twin, stages
        twin.overspill.check_conserved()
