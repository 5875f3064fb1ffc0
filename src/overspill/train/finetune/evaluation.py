"""Evaluation: the loss on rows, the predicted labels."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

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
) -> list[float]:
    """The summed loss of each row. Each rank of `team` computes a part of every batch."""
    team = team or Team()
    found: list[list[float]] = []
    for at in range(0, len(rows), batch):
        own, counted = team.own(rows[at : at + batch])
        inputs = collate(own)
        out = model(**inputs, use_cache=False)
        found.append(summed_losses(out.logits, inputs["labels"], seq2seq).tolist()[:counted])
    parts = zip(*team.gather(found), strict=True)  # of one batch, in the order of ranks
    return [loss for batch_parts in parts for part in batch_parts for loss in part]


def mean_loss(losses: Sequence[float], rows: Sequence[Row]) -> float:
    """The mean over all learned tokens."""
    return sum(losses) / sum(row.learned for row in rows)


def chosen(losses: Sequence[float], choices: Sequence[Choice]) -> list[int]:
    """The most likely label of each sentence; `losses` are those of all rows of all choices."""
    picked, at = [], 0
    for choice in choices:
        own = losses[at : at + len(choice.rows)]
        picked.append(own.index(min(own)))
        at += len(choice.rows)
    return picked
