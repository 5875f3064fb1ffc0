"""Evaluation: the loss on rows, the predicted labels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from overspill.models.stages.stages import Stages
from overspill.train.finetune.classification import Choice
from overspill.train.finetune.rows import IGNORED, Batch, Row
from overspill.train.team import Team

Collate = Callable[[Sequence[Row]], Batch]
Model = Callable[..., object]


@torch.no_grad()
def summed_losses(logits: torch.Tensor, labels: torch.Tensor, seq2seq: bool) -> torch.Tensor:
    """The cross-entropy of each sequence, summed over its learned tokens: [B]."""
    if not seq2seq:  # position i predicts token i + 1
        logits, labels = logits[:, :-1], labels[:, 1:]
    # One sequence at a time: float32 logits of the whole batch may not fit.
    pairs = zip(logits, labels, strict=True)
    losses = [
        F.cross_entropy(row.float(), label, ignore_index=IGNORED, reduction="sum")
        for row, label in pairs
    ]
    return torch.stack(losses)


def row_losses(
    model: torch.nn.Module,
    rows: Sequence[Row],
    batch: int,
    collate: Collate,
    seq2seq: bool,
    team: Team | None = None,
    stages: Stages | None = None,
    at_once: int = 1,
) -> list[float]:
    """The summed loss of each row. Each rank of `team` computes a part of every batch.

    With `stages`, `at_once` batches pass a stage before the next one. Rows are read as they are
    needed: a sequence may make them.
    """
    team = team or Team()
    found: list[list[float]] = []
    starts = range(0, len(rows), batch)
    for first in range(0, len(starts), at_once):
        group = [team.own(rows[at : at + batch]) for at in starts[first : first + at_once]]
        batches = [collate(own) for own, _ in group]

        def take(number: int, output: Any, group: Any = group, batches: Any = batches) -> None:
            losses = summed_losses(output.logits, batches[number]["labels"], seq2seq)
            found.append(losses.tolist()[: group[number][1]])

        inputs = [{**inputs, "use_cache": False} for inputs in batches]
        if stages is not None:
            stages.forward(inputs, take)
        else:
            for number, each in enumerate(inputs):
                take(number, model(**each))
    has_outputs = stages is None or stages.has_outputs
    by_batch = zip(*team.gather_parts(found if has_outputs else None), strict=True)
    return [loss for batch_parts in by_batch for part in batch_parts for loss in part]


def mean_loss(losses: Sequence[float], rows: Sequence[Row]) -> float:
    """The mean over all learned tokens."""
    return sum(losses) / sum(row.learned for row in rows)


def chosen(losses: Sequence[float], choices: Sequence[Choice]) -> list[int]:
    """The most likely label of each sentence; `losses` are those of all rows of all choices."""
    picked, at = [], 0
    for choice in choices:
        own = losses[at : at + len(choice.answers)]
        picked.append(own.index(min(own)))
        at += len(own)
    return picked
